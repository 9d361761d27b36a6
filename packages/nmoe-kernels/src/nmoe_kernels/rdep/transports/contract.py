"""What every transport does, and what it hands over.

A transport moves rows by a `SourcePlan`: out to the owners of the chosen experts (dispatch), and
back, one row per (token, owner), summed at the source (combine). The backward is the same two
moves: the gradient of y goes out as rows alone, that of x comes back by the sum. Each move is one
exchange, an epoch, that all ranks make in the same order.

Received rows lie by (source rank, token) in one of two layouts. Packed: N rows, all of them used, N
and the number of assignments known on the host. Fixed segments: N = R * T_max, those of source s
from s * T_max on, counts on the device; unused rows have ids -1 everywhere and undefined content.
The expert MLP takes both, since a slot with id -1 belongs to no expert.

Letters: R ranks, E experts, E_l = E / R owned by each, T tokens of this rank, T_max the most of any
rank, K experts per token, H width, N rows received.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nmoe_kernels.rdep.plan import SourcePlan


@dataclass(frozen=True)
class Shape:
    """What a transport is opened for: the same on every rank, but for rank and device.

    capacity: the most assignments that an expert takes from one source, None without a limit.
    """

    rank: int
    ranks: int
    experts: int
    slots: int
    width: int
    tokens_max: int
    dtype: torch.dtype
    device: torch.device
    capacity: int | None
    deadline_s: float

    @property
    def experts_local(self) -> int:
        """E_l, the experts that each rank owns."""
        return self.experts // self.ranks

    @property
    def sizes(self) -> tuple[object, ...]:
        """What all ranks must have alike: where a row lies in a peer's memory follows from it."""
        return (
            self.experts,
            self.slots,
            self.width,
            self.tokens_max,
            self.dtype,
            self.capacity,
        )


@dataclass(frozen=True)
class Delivery:
    """What stays of a dispatch until the backward: everything but the rows.

    ids_NK: int32 local experts, -1 where the slot's expert is not here. assignments: a bound, known
    on the host, of how many slots have an expert here; None if only N * K bounds it. route: what
    the transport needs to move rows the same way again, and back.
    """

    plan: SourcePlan
    ids_NK: Tensor
    assignments: int | None
    route: Any


class Transport(Protocol):
    """Moves rows between the ranks of one group; made, used and closed by all ranks together.

    `layer` names the caller's layer in errors. All raise KernelError: E-RDEP-LATE for a peer past
    the deadline, E-RDEP-PEER for one that has left, E-RDEP-ORDER for one in another exchange.
    """

    name: str
    reuses_rows: bool
    """Whether rows handed over are valid only until the next exchange begins."""

    def dispatch(
        self, plan: SourcePlan, x_TH: Tensor, weights_TK: Tensor, layer: str
    ) -> tuple[Tensor, Tensor, Delivery]:
        """Rows [N, H], their weights [N, K] (0 where the id is -1), and the delivery."""
        ...

    def dispatch_again(self, delivery: Delivery, rows_TH: Tensor, layer: str) -> Tensor:
        """Other rows [T, H] by the route of an earlier dispatch: [N, H] at the owners."""
        ...

    def combine(
        self, delivery: Delivery, rows_NH: Tensor, weights_NK: Tensor | None, layer: str
    ) -> tuple[Tensor, Tensor | None]:
        """Sums one row per (token, owner) into [T, H], in rank order, in fp32 (fp64 for fp64).

        The sum has the dtype of `rows_NH`; a token that was sent nowhere gets 0. weights_NK: values
        of each slot, 0 where the id is -1, that go back to [T, K] (the gradient of the weights).
        """
        ...

    def wait_seconds(self) -> Tensor:
        """Seconds stood waiting for each rank so far, float64 [R] on the CPU."""
        ...

    def check(self) -> None:
        """Raises what a device has noted, for a transport that does not wait for it."""
        ...

    def close(self) -> None:
        """Frees what the transport holds; it cannot be used afterwards."""
        ...
