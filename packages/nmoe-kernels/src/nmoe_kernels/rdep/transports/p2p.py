"""The exchange by one-sided stores to the GPUs of the same host, over NVLink.

A dispatch is one put and one wait. A row's place at its owner, in the segment of its source,
follows from this rank's plan alone, so that rows need no counts to be placed, and one flag per pair
says that rows and counts are there. That flag is the announcement of `protocol` as well: who
delivers an epoch has read everything of the epochs before it. A combine is the same the other way,
and a sum that takes this rank's own rows from where they are. Nothing here waits for the device:
what went wrong there is found in pinned memory by the next call.

Letters: R ranks, T tokens of this rank, T_max the most of any rank, K slots, H width, N = R * T_max
rows.
"""

import socket
from collections import deque

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from nmoe_kernels.errors import KernelError
from nmoe_kernels.rdep import kernels
from nmoe_kernels.rdep.counters import Tally
from nmoe_kernels.rdep.failures import Place, late
from nmoe_kernels.rdep.memory import SymmetricMemory, chunks_of, misfit
from nmoe_kernels.rdep.plan import SourcePlan
from nmoe_kernels.rdep.protocol import AREAS
from nmoe_kernels.rdep.transports.contract import Delivery, Shape

BLOCKS = 64
"""Programs that move rows: enough to fill the links nearly, few enough to leave room beside."""
MOST_BLOCKS = 1024
"""Programs that may wait, each with a clock of its own."""
PUTTERS = 0.5
"""Share of a combine's programs that return rows first; the others sum what has come."""
SUMMED = 16384
"""Numbers that a program sums at once."""
TILE_BYTES = 32768
"""What a program has in flight."""
WARPS = 16
# A local expert as int32 and a weight as fp32.
SLOT_BYTES = 8
# Exchanges whose names are kept for errors.
REMEMBERED = 64


def why_unusable(shape: Shape, group: dist.ProcessGroup) -> str | None:
    """Why this group cannot use it, or None; all ranks ask together."""
    reason = misfit(shape, group)
    if reason is not None:
        return reason
    index = shape.device.index if shape.device.index is not None else torch.cuda.current_device()
    told: list[tuple[str, int]] = [("", 0)] * shape.ranks
    dist.all_gather_object(told, (socket.gethostname(), index), group=group)
    if len({host for host, _ in told}) > 1:
        return "its ranks are on several hosts; the transport for those is nvshmem"
    others = [other for _, other in told if other != index]
    closed = [n for n in others if not torch.cuda.can_device_access_peer(index, n)]
    # What one rank cannot reach, all must know: they choose the same transport.
    closed_by: list[tuple[int, list[int]]] = [(0, [])] * shape.ranks
    dist.all_gather_object(closed_by, (index, closed), group=group)
    for one, unreached in closed_by:
        if unreached:
            return f"cuda:{one} cannot reach the memory of cuda:{unreached[0]}"
    return None


def open_transport(shape: Shape, group: dist.ProcessGroup, tally: Tally) -> "PeerToPeer":
    """Opens it on every rank of the group."""
    return PeerToPeer(shape, group, tally)


class PeerToPeer:
    """The transport over symmetric memory; see `Transport`."""

    name = "p2p"
    reuses_rows = True
    staged = False
    """Whether what goes to others is laid out here first."""
    signals = 1
    """How many puts of an epoch a peer's flag counts."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup, tally: Tally) -> None:
        self._shape, self._tally = shape, tally
        self._peers = dist.get_process_group_ranks(group)
        self._memory: SymmetricMemory | None = SymmetricMemory(shape, group, self.staged)
        device = shape.device
        self._epoch = torch.zeros(1, dtype=torch.int64, device=device)
        # Programs that are through with what they put or awaited.
        self._done = torch.zeros(1, dtype=torch.int32, device=device)
        self._chunks_done = torch.zeros(chunks_of(shape), dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self._clock = torch.zeros(MOST_BLOCKS, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._wait_ns = torch.zeros(shape.ranks, dtype=torch.int64, device=device)
        self._report = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self._exchanges = 0
        self._places: deque[Place] = deque(maxlen=REMEMBERED)
        self.blocks = BLOCKS
        properties = torch.cuda.get_device_properties(device)
        self._multiprocessors = properties.multi_processor_count
        self._deadline_ns = int(shape.deadline_s * 1e9)

    def dispatch(
        self, plan: SourcePlan, x_TH: Tensor, weights_TK: Tensor, layer: str
    ) -> tuple[Tensor, Tensor, Delivery]:
        """Each unique row, with the local ids and weights of its slots."""
        shape = self._shape
        area = self._begin("dispatch", layer)
        self._put(x_TH, plan, area, weights_TK)
        self._meet(area)
        rows = shape.ranks * shape.tokens_max
        ids_NK = torch.empty(rows, shape.slots, dtype=torch.int32, device=shape.device)
        weights_NK = torch.empty(rows, shape.slots, dtype=torch.float32, device=shape.device)
        counts_R = torch.empty(shape.ranks, dtype=torch.int64, device=shape.device)
        tile = 128
        kernels.open_kernel[(triton.cdiv(shape.tokens_max, tile), shape.ranks)](
            *self._areas(area, "ids", "weights", "counts"),
            ids_NK,
            weights_NK,
            counts_R,
            shape.slots,
            shape.ranks,
            shape.tokens_max,
            SLOTS=self._slots,
            TILE=tile,
        )
        (rows_NH,) = self._areas(area, "rows")
        most = rows * min(shape.slots, shape.experts_local)
        if shape.capacity is not None:
            most = min(most, shape.capacity * shape.experts_local * shape.ranks)
        return rows_NH, weights_NK, Delivery(plan, ids_NK, most, counts_R)

    def dispatch_again(self, delivery: Delivery, rows_TH: Tensor, layer: str) -> Tensor:
        """Rows alone: the owners still have ids and weights."""
        area = self._begin("second dispatch", layer)
        self._put(rows_TH, delivery.plan, area, None)
        self._meet(area)
        return self._areas(area, "rows")[0]

    def combine(
        self, delivery: Delivery, rows_NH: Tensor, weights_NK: Tensor | None, layer: str
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows back to where their tokens are, and sums."""
        shape, plan, tally = self._shape, delivery.plan, self._tally
        area, parts = self._begin("combine", layer), self._open.parts
        with_slots = weights_NK is not None
        rows_NH = rows_NH.contiguous()
        values_NK = rows_NH if weights_NK is None else weights_NK.contiguous()
        tokens = plan.ids_TK.shape[0]
        y_TH = rows_NH.new_empty(tokens, shape.width)
        values_TK = values_NK.new_empty(tokens, shape.slots) if with_slots else y_TH
        self._return(delivery, rows_NH, values_NK, area, with_slots)
        # No more than run at once: those that sum wait for those that put, at other ranks.
        blocks = min(self.blocks, self._multiprocessors)
        putters = 0 if self.staged else max(1, int(blocks * PUTTERS))
        tile, block = tile_of(shape, max(1, putters))
        slots_bytes = shape.slots * values_NK.dtype.itemsize if with_slots else 0
        kernels.combine_kernel[(blocks,)](
            rows_NH,
            values_NK,
            delivery.route,
            plan.slot_TR,
            plan.rows_R,
            y_TH,
            values_TK,
            self._open.bases,
            self._epoch,
            self._done,
            self._chunks_done,
            self._ticket,
            self._clock,
            self._failed,
            self._report,
            self._wait_ns,
            tally.rows_sent_R,
            tally.bytes_sent_R,
            tokens,
            shape.width,
            shape.slots,
            shape.rank,
            shape.ranks,
            shape.tokens_max,
            shape.width * rows_NH.dtype.itemsize + slots_bytes,
            putters,
            parts.rows[area],
            parts.weights[area],
            parts.flags,
            self.signals,
            self._deadline_ns,
            area,
            WITH_SLOTS=with_slots,
            SLOTS=self._slots,
            RANKS=self._ranks,
            CHUNKS=1 if self.staged else len(self._chunks_done),
            AREAS=AREAS,
            TILE=tile,
            SUMMED=max(1, min(tile, SUMMED // block)),
            BLOCK=block,
            num_warps=WARPS,
        )
        return y_TH, values_TK if with_slots else None

    def wait_seconds(self) -> Tensor:
        """Seconds waited for each peer, float64 [R]; reads the device."""
        return self._wait_ns.cpu().double() * 1e-9

    def check(self) -> None:
        """Raises what went wrong on the device, as far as it is known by now. KernelError
        E-RDEP-LATE: a peer passed the deadline. E-RDEP-GRAPH: a graph with an odd number of
        exchanges was replayed.
        """
        source, epoch, kind = self._report.tolist()
        if not source:
            return
        places = [place for place in self._places if place.epoch == epoch]
        place = places[0] if places else Place("of a captured graph", "exchange", epoch)
        if kind == 1:
            raise late([self._peers[source - 1]], place, self._shape.deadline_s)
        raise KernelError(
            "E-RDEP-GRAPH",
            f"the {place} came to the other receive area than the host counted on",
            "capture whole layers, so that a graph holds an even number of exchanges",
        )

    def close(self) -> None:
        """Frees the symmetric memory once the device is done with it."""
        if self._memory is not None:
            torch.cuda.synchronize(self._shape.device)
            self._memory = None

    @property
    def _open(self) -> SymmetricMemory:
        assert self._memory is not None
        return self._memory

    @property
    def _slots(self) -> int:
        return triton.next_power_of_2(self._shape.slots)

    @property
    def _ranks(self) -> int:
        return triton.next_power_of_2(self._shape.ranks)

    def _begin(self, phase: str, layer: str) -> int:
        """Counts an exchange and gives its area."""
        self.check()
        self._exchanges += 1
        self._tally.exchanges += 1
        self._places.append(Place(layer, phase, self._exchanges))
        return self._exchanges % AREAS

    def _put(self, x_TH: Tensor, plan: SourcePlan, area: int, weights_TK: Tensor | None) -> None:
        shape, memory, tally = self._shape, self._open, self._tally
        parts = memory.parts
        tile, block = tile_of(shape, self.blocks)
        weights = x_TH if weights_TK is None else weights_TK.float().contiguous()
        slots_bytes = 0 if weights_TK is None else shape.slots * SLOT_BYTES
        kernels.put_kernel[(self.blocks,)](
            x_TH,
            plan.ids_TK.contiguous(),
            weights,
            plan.slot_TR,
            plan.rows_R,
            memory.bases,
            self._epoch,
            self._done,
            tally.rows_sent_R,
            tally.bytes_sent_R,
            x_TH.shape[0],
            shape.width,
            shape.slots,
            shape.experts_local,
            shape.rank,
            shape.ranks,
            shape.tokens_max,
            shape.width * x_TH.dtype.itemsize + slots_bytes,
            parts.rows[area],
            parts.ids[area],
            parts.weights[area],
            parts.counts[area],
            parts.flags,
            parts.staging(area),
            WITH_SLOTS=weights_TK is not None,
            STAGED=self.staged,
            SLOTS=self._slots,
            TILE=tile,
            BLOCK=block,
            num_warps=WARPS,
        )

    def _return(
        self, delivery: Delivery, rows_NH: Tensor, values_NK: Tensor, area: int, with_slots: bool
    ) -> None:
        """Sends results back, where a combine's kernel does not do so itself."""

    def _meet(self, area: int) -> None:
        """Waits, on the device, until all have put; ends the epoch."""
        shape, memory = self._shape, self._open
        kernels.meet_kernel[(1,)](
            memory.bases,
            self._epoch,
            self._clock,
            self._failed,
            self._report,
            self._wait_ns,
            shape.rank,
            shape.ranks,
            memory.parts.flags,
            self.signals,
            self._deadline_ns,
            area,
            RANKS=self._ranks,
            AREAS=AREAS,
            num_warps=1,
        )

    def _areas(self, area: int, *names: str) -> list[Tensor]:
        """This rank's parts of an area: rows [N, H], ids and weights [N, K], counts [R]."""
        shape, memory = self._shape, self._open
        rows = shape.ranks * shape.tokens_max
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "rows": ((rows, shape.width), shape.dtype),
            "ids": ((rows, shape.slots), torch.int32),
            "weights": ((rows, shape.slots), torch.float32),
            "counts": ((shape.ranks,), torch.int64),
        }
        return [memory.view(getattr(memory.parts, name)[area], *kinds[name]) for name in names]


def tile_of(shape: Shape, blocks: int) -> tuple[int, int]:
    """Rows and columns that a program moves at once: no more rows than give every program some."""
    divisor = shape.width & -shape.width
    # Columns without a rest, unless that makes them few.
    block = min(4096, divisor if divisor >= 512 else triton.next_power_of_2(shape.width))
    fitting = max(1, TILE_BYTES // (block * shape.dtype.itemsize))
    return min(fitting, triton.next_power_of_2(triton.cdiv(shape.tokens_max, blocks))), block
