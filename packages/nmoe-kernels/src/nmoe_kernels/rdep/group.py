"""An expert-parallel group: which rank owns which experts, and the transport between them.

The group is an object with a size: it is made for one shape of layer and for at most T_max tokens
of a rank, holds the buffers of its transport, and frees them when it is closed. Several of several
shapes live side by side. All ranks make it, use it and close it together.

Letters: R ranks, E experts, E_l = E / R owned by each rank (contiguous), T tokens of this rank,
T_max the most of any rank, K experts per token, H width.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_kernels.errors import KernelError
from nmoe_kernels.grouping import group_rows
from nmoe_kernels.rdep.counters import Counters, Tally
from nmoe_kernels.rdep.settings import Settings
from nmoe_kernels.rdep.transports import Shape, Transport, open_transport
from nmoe_kernels.router import RouterConfig, Routing, apply_capacity

logger = logging.getLogger("nmoe_kernels")


class ExpertParallel:
    """The ranks that share the experts of MoE layers of one shape.

    group: the process group, None for a single rank. experts: E. width: H. slots: K. tokens_max:
    T_max. dtype, device: those of the tokens. Raises KernelError: E-RDEP-SHAPE for sizes that do
    not fit, E-RDEP-TRANSPORT for a transport that cannot run.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        experts: int,
        width: int,
        slots: int,
        tokens_max: int,
        dtype: torch.dtype,
        device: torch.device | str,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        _check_sizes(self.ranks, experts, width, slots, tokens_max)
        limit = self.settings.capacity
        bound = None if limit == "exact" else math.ceil(limit * tokens_max * slots / experts)
        self.shape = Shape(
            rank=self.rank,
            ranks=self.ranks,
            experts=experts,
            slots=slots,
            width=width,
            tokens_max=tokens_max,
            dtype=dtype,
            device=torch.device(device),
            capacity=bound,
            deadline_s=self.settings.deadline_s,
        )
        self.tally = Tally(self.rank, self.ranks, self.shape.device)
        self._link: Transport | None = open_transport(self.settings, self.shape, group, self.tally)
        self._beside: torch.cuda.Stream | None = None
        self._overflow = torch.zeros_like(self.tally.overflow)
        self.transport = self._link.name
        logger.info("experts: %d ranks, transport %s", self.ranks, self.transport)

    @property
    def experts_local(self) -> int:
        """E_l, how many experts this rank owns."""
        return self.shape.experts_local

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns."""
        return range(self.rank * self.experts_local, (self.rank + 1) * self.experts_local)

    @property
    def link(self) -> Transport:
        """The open transport. Raises KernelError (E-RDEP-CLOSED) after `close`."""
        if self._link is None:
            raise KernelError(
                "E-RDEP-CLOSED", "the expert-parallel group is closed", "make another"
            )
        return self._link

    def limit(
        self, routing: Routing, config: RouterConfig, bias_E: Tensor | None = None
    ) -> Routing:
        """The routing within the group's capacity under "drop" and "reroute" (`apply_capacity`).

        config, bias_E: what the routing was made with. Unchanged without a capacity, and under
        "error", where `expert_parallel_moe` counts what is beyond it.
        """
        tokens, overflow = routing.ids_TK.shape[0], self.settings.overflow
        if self.shape.capacity is None or overflow == "error" or tokens == 0:
            return routing
        # Half an assignment below the bound, so that rounding never moves the ceiling.
        factor = (self.shape.capacity - 0.5) * config.experts / routing.ids_TK.numel()
        bounded = dataclasses.replace(config, capacity_factor=factor, overflow=overflow)
        return apply_capacity(routing, bounded, bias_E)

    def within_capacity(self, ids_TK: Tensor, count: bool) -> Tensor:
        """Ids with E where an expert is beyond its capacity, earlier tokens first.

        count: whether what reaches no expert is added to the counters.
        """
        experts, capacity = self.shape.experts, self.shape.capacity
        kept_TK = ids_TK
        if capacity is not None:
            grouping = group_rows(ids_TK, experts)
            place_TK = grouping.inverse_TK - grouping.offsets_E1[ids_TK.clamp(0, experts)]
            kept_TK = ids_TK.masked_fill(place_TK >= capacity, experts)
        if count:
            beyond = ((kept_TK == experts) & (ids_TK != experts)).sum()
            self.tally.dropped += (kept_TK == experts).sum()
            self.tally.overflow += beyond
            self._overflow += beyond
        return kept_TK

    def start_beside(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
        """Begins work on x that needs no exchange, such as a shared expert; returns who waits.

        On CUDA the work runs in a stream of its own, and its backward too, so that it computes
        while rows travel; elsewhere it is done at once. Call what is returned after the layer.
        """
        if self.shape.device.type != "cuda":
            done = work(x)
            return lambda: done
        main = torch.cuda.current_stream(self.shape.device)
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.shape.device)
        beside = self._beside
        beside.wait_stream(main)
        # The allocator must not give x away before the other stream has read it.
        x.record_stream(beside)
        with torch.cuda.stream(beside):
            start = self.tally.mark()
            y = work(x)
            end = self.tally.mark()
        if not torch.cuda.is_current_stream_capturing():
            assert start.event is not None and end.event is not None
            self.tally.beside = (start.event, end.event)

        def join() -> Tensor:
            self.tally.beside = None
            main.wait_stream(beside)
            y.record_stream(main)
            return y

        return join

    def counters(self) -> Counters:
        """What has been moved, dropped and waited for since the group was made."""
        return self.tally.snapshot(self.link.wait_seconds())

    def check(self) -> None:
        """Raises what the device has noted since the last check; reads it on the host.

        KernelError E-RDEP-CAPACITY: assignments beyond the capacity under overflow "error"; or
        what the transport has to say.
        """
        self.link.check()
        if self.shape.capacity is None or self.settings.overflow != "error":
            return
        beyond = int(self._overflow)
        self._overflow.zero_()
        if beyond:
            raise KernelError(
                "E-RDEP-CAPACITY",
                f"{beyond} assignments of rank {self.rank} were beyond the {self.shape.capacity} "
                f"that an expert takes from one rank (rdep.capacity {self.settings.capacity})",
                "raise rdep.capacity, or choose to drop or reroute by rdep.overflow",
            )

    def close(self) -> None:
        """Frees the transport's buffers. A second call does nothing."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> "ExpertParallel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_sizes(ranks: int, experts: int, width: int, slots: int, tokens_max: int) -> None:
    if experts < 1 or experts % ranks:
        what = f"{ranks} ranks do not divide {experts} experts"
        raise KernelError("E-RDEP-SHAPE", what, "choose a group size that does")
    for name, value, most in (
        ("width", width, None),
        ("slots", slots, experts),
        # Rows and slots of the receive area are counted in 32 bits.
        ("tokens_max", tokens_max, (2**31 - 1) // (ranks * max(slots, 1))),
    ):
        if value < 1 or (most is not None and value > most):
            what = f"{name} of the expert-parallel group is {value}"
            wanted = "1 or more" if most is None else f"1 to {most}"
            raise KernelError("E-RDEP-SHAPE", what, f"make it {wanted}")
