"""The exchange by `all_to_all_single`: any backend of torch.distributed, any device.

The reference for every other transport, and what CPUs run. Counts pass between hosts first
(`Announcements`), so that both sides know their splits and a late or dead peer is named; then rows,
ids and weights each take one all-to-all. On a GPU this reads counts on the host once per dispatch.

Letters: R ranks, T tokens of this rank, K experts per token, H width, S rows sent, N rows received.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_kernels.rdep.counters import Tally
from nmoe_kernels.rdep.failures import Place
from nmoe_kernels.rdep.plan import SourcePlan
from nmoe_kernels.rdep.protocol import Epoch
from nmoe_kernels.rdep.transports.announce import Announcements
from nmoe_kernels.rdep.transports.contract import Delivery, Shape


@dataclass(frozen=True)
class Splits:
    """The token of each row sent, int64 [S], and how many rows go to and come from each rank."""

    token_S: Tensor
    sent: list[int]
    received: list[int]


class Collective:
    """The transport over a process group; see `Transport`."""

    name = "collective"
    reuses_rows = False

    def __init__(
        self, shape: Shape, settings_text: str, group: dist.ProcessGroup, tally: Tally
    ) -> None:
        self._shape, self._group, self._tally = shape, group, tally
        self._announcements = Announcements(shape, settings_text, group)
        self._epoch = Epoch(0)

    def dispatch(
        self, plan: SourcePlan, x_TH: Tensor, weights_TK: Tensor, layer: str
    ) -> tuple[Tensor, Tensor, Delivery]:
        """Each unique row, with the local ids and weights of its slots."""
        counts_R2 = torch.stack([plan.rows_R, plan.assignments_R], dim=1).cpu()
        place, received_R2 = self._announce("dispatch", layer, counts_R2)
        sent = counts_R2[:, 0].tolist()
        owner_S, token_S = plan.sent_order(sum(sent))
        ids_SK, own_SK = plan.local_ids(owner_S, token_S)
        weights_SK = torch.where(own_SK, weights_TK[token_S], 0.0)
        splits = Splits(token_S, sent, received_R2[:, 0].tolist())
        rows_NH = self._send(x_TH[token_S], splits, place)
        ids_NK = self._send(ids_SK, splits, place)
        weights_NK = self._send(weights_SK, splits, place)
        self._count(counts_R2[:, 0], x_TH, ids_SK, weights_SK)
        assignments = int(received_R2[:, 1].sum())
        return rows_NH, weights_NK, Delivery(plan, ids_NK, assignments, splits)

    def dispatch_again(self, delivery: Delivery, rows_TH: Tensor, layer: str) -> Tensor:
        """Rows alone: the owners still have ids and weights."""
        place, _ = self._announce("second dispatch", layer)
        splits: Splits = delivery.route
        self._count(torch.tensor(splits.sent), rows_TH)
        return self._send(rows_TH[splits.token_S], splits, place)

    def combine(
        self, delivery: Delivery, rows_NH: Tensor, weights_NK: Tensor | None, layer: str
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows back to where their tokens are, and sums."""
        place, _ = self._announce("combine", layer)
        splits: Splits = delivery.route
        back = Splits(splits.token_S, splits.received, splits.sent)
        tokens = delivery.plan.ids_TK.shape[0]
        self._count(torch.tensor(splits.received), rows_NH, weights_NK)
        y_TH = _sum_by_token(self._send(rows_NH, back, place), splits, tokens)
        if weights_NK is None:
            return y_TH, None
        return y_TH, _sum_by_token(self._send(weights_NK, back, place), splits, tokens)

    def wait_seconds(self) -> Tensor:
        """What the announcements waited for each rank."""
        return self._announcements.wait_s_R

    def check(self) -> None:
        """There is nothing to find: failures are raised where they happen."""

    def close(self) -> None:
        """There is nothing to free: the group is the caller's."""

    def _announce(
        self, phase: str, layer: str, counts_RC: Tensor | None = None
    ) -> tuple[Place, Tensor]:
        self._epoch = self._epoch.following()
        place = Place(layer, phase, self._epoch.number)
        nothing_R0 = torch.empty(self._shape.ranks, 0, dtype=torch.int64)
        return place, self._announcements.exchange(
            place, nothing_R0 if counts_RC is None else counts_RC
        )

    def _count(self, rows_R: Tensor, *payloads: Tensor | None) -> None:
        sizes = (part.shape[1] * part.dtype.itemsize for part in payloads if part is not None)
        self._tally.sent(rows_R.to(self._shape.device), sum(sizes))

    def _send(self, rows: Tensor, splits: Splits, place: Place) -> Tensor:
        """All-to-all of rows [S, ...] in the order of ranks: [N, ...]."""
        rows = rows.contiguous()
        received = rows.new_empty(sum(splits.received), *rows.shape[1:])
        sizes = (splits.received, splits.sent)
        if rows.device.type != "cpu":
            dist.all_to_all_single(received, rows, *sizes, group=self._group)
            return received
        try:
            work = dist.all_to_all_single(received, rows, *sizes, group=self._group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self._shape.deadline_s))
        except RuntimeError as failure:
            raise self._announcements.failed(place, failure) from failure
        return received


def _sum_by_token(rows_SC: Tensor, splits: Splits, tokens: int) -> Tensor:
    """The sum of each token's rows, one owner after another, in fp32 or fp64: [T, C]."""
    wide = torch.float64 if rows_SC.dtype == torch.float64 else torch.float32
    total = rows_SC.new_zeros(tokens, rows_SC.shape[1], dtype=wide)
    parts = zip(splits.token_S.split(splits.sent), rows_SC.split(splits.sent), strict=True)
    for token_S, rows in parts:
        # An owner has one row of a token at most: each element gets one addend, in a fixed order.
        total.index_add_(0, token_S, rows.to(wide))
    return total.to(rows_SC.dtype)
