"""One rank owns every expert: nothing moves, and the expert MLP gathers tokens where they are."""

import torch
from torch import Tensor

from nmoe_kernels.rdep.counters import Tally
from nmoe_kernels.rdep.plan import SourcePlan
from nmoe_kernels.rdep.transports.contract import Delivery, Shape


class Local:
    """The transport of a group of one; see `Transport`."""

    name = "local"
    reuses_rows = False

    def __init__(self, shape: Shape, tally: Tally) -> None:
        self._shape, self._tally = shape, tally

    def dispatch(
        self, plan: SourcePlan, x_TH: Tensor, weights_TK: Tensor, layer: str
    ) -> tuple[Tensor, Tensor, Delivery]:
        """The tokens themselves are the rows."""
        self._tally.exchanges += 1
        ids_TK = plan.ids_TK
        own_TK = (ids_TK >= 0) & (ids_TK < self._shape.experts)
        ids_NK = torch.where(own_TK, ids_TK, -1).to(torch.int32)
        weights_NK = torch.where(own_TK, weights_TK, 0.0)
        return x_TH, weights_NK, Delivery(plan, ids_NK, assignments=None, route=None)

    def dispatch_again(self, delivery: Delivery, rows_TH: Tensor, layer: str) -> Tensor:
        """The same rows."""
        self._tally.exchanges += 1
        return rows_TH

    def combine(
        self, delivery: Delivery, rows_NH: Tensor, weights_NK: Tensor | None, layer: str
    ) -> tuple[Tensor, Tensor | None]:
        """The same rows: a sum of one."""
        self._tally.exchanges += 1
        return rows_NH, weights_NK

    def wait_seconds(self) -> Tensor:
        """None: there is no peer."""
        return torch.zeros(1, dtype=torch.float64)

    def check(self) -> None:
        """There is nothing to find."""

    def close(self) -> None:
        """There is nothing to free."""
