"""The exchange by one-sided puts of NVSHMEM, between GPUs of one host or of several.

As `p2p`, with one step more: what goes to others is laid out in a staging area of the symmetric
heap first, from where a kernel of NVSHMEM puts it (`network`). Received rows lie the same way, so
that everything before and after is that of `p2p`.

Letters: R ranks, T_max the most of any rank, K slots, H width, N = R * T_max rows.
"""

import functools
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from nmoe_kernels.rdep import kernels
from nmoe_kernels.rdep.counters import Tally
from nmoe_kernels.rdep.memory import misfit
from nmoe_kernels.rdep.plan import SourcePlan
from nmoe_kernels.rdep.transports.contract import Delivery, Shape
from nmoe_kernels.rdep.transports.p2p import WARPS, PeerToPeer, tile_of

BACKEND: Final = "NVSHMEM"
SENDERS = 32
"""Programs that put rows."""
SENDER_WARPS = 32


def why_unusable(shape: Shape, group: dist.ProcessGroup) -> str | None:
    """Why this group cannot use it, or None; all ranks ask together."""
    reason = _missing(shape)
    told: list[str | None] = [None] * shape.ranks
    # What one rank lacks, all must know: they choose the same transport.
    dist.all_gather_object(told, reason, group=group)
    return next((reason for reason in told if reason), None) or misfit(shape, group)


def _missing(shape: Shape) -> str | None:
    if not symmetric.is_nvshmem_available():
        return "NVSHMEM is not installed (pip install 'nmoe-kernels[nvshmem]')"
    try:
        _sender()
        if symmetric.get_backend(shape.device) != BACKEND:
            symmetric.set_backend(BACKEND)
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def open_transport(shape: Shape, group: dist.ProcessGroup, tally: Tally) -> "Nvshmem":
    """Opens it on every rank of the group."""
    return Nvshmem(shape, group, tally)


class Nvshmem(PeerToPeer):
    """The transport over NVSHMEM's symmetric heap; see `Transport`."""

    name = "nvshmem"
    staged = True
    signals = SENDERS

    def __init__(self, shape: Shape, group: dist.ProcessGroup, tally: Tally) -> None:
        super().__init__(shape, group, tally)
        processes = dist.get_process_group_ranks(group)
        self._processes = torch.tensor(processes, dtype=torch.int32, device=shape.device)

    def _put(self, x_TH: Tensor, plan: SourcePlan, area: int, weights_TK: Tensor | None) -> None:
        super()._put(x_TH, plan, area, weights_TK)
        with_slots = weights_TK is not None
        self._send(plan.rows_R, area, with_ids=with_slots, with_weights=with_slots)

    def _return(
        self, delivery: Delivery, rows_NH: Tensor, values_NK: Tensor, area: int, with_slots: bool
    ) -> None:
        """Puts results back at the ranks of their tokens."""
        shape, memory = self._shape, self._open
        tile, block = tile_of(shape, self.blocks)
        kernels.stage_kernel[(self.blocks,)](
            rows_NH,
            values_NK,
            delivery.route,
            memory.bases,
            shape.width,
            shape.slots,
            shape.rank,
            shape.ranks,
            shape.tokens_max,
            memory.parts.rows[area],
            memory.parts.weights[area],
            memory.parts.staging(area),
            WITH_SLOTS=with_slots,
            SLOTS=self._slots,
            TILE=tile,
            BLOCK=block,
            num_warps=WARPS,
        )
        self._send(delivery.route, area, with_ids=False, with_weights=with_slots)

    def _send(self, rows_R: Tensor, area: int, *, with_ids: bool, with_weights: bool) -> None:
        shape, memory = self._shape, self._open
        parts = memory.parts
        _sender()[(SENDERS,)](
            rows_R,
            memory.bases,
            self._processes,
            shape.rank,
            shape.ranks,
            shape.tokens_max,
            shape.width * shape.dtype.itemsize,
            shape.slots * 4,
            parts.rows[area],
            parts.ids[area],
            parts.weights[area],
            parts.counts[area],
            parts.flags,
            parts.staging(area),
            WITH_IDS=with_ids,
            WITH_WEIGHTS=with_weights,
            num_warps=SENDER_WARPS,
        )


@functools.cache
def _sender() -> Any:
    """The kernel that sends, with NVSHMEM's device code linked in."""
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    from nmoe_kernels.rdep.network import send_kernel

    return requires_nvshmem(send_kernel)
