"""What Muon sends and takes for a moment where ranks share matrices, without the ranks.

`parallel.matrices` gives every matrix that several ranks hold an owner. Here the matrices of a
rank's weights are counted by how many ranks hold them, and in how many parts; what owners get, make
and give is then that of a mean rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nmoe_train.model import Transformer
from nmoe_train.model.box import Box
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import HiddenWeight, hidden_weights
from nmoe_train.optim.muon import working_bytes
from nmoe_train.parallel import Layout
from nmoe_train.parallel.matrices import ROUND_NUMBERS

NUMBER = 4
"""Bytes of fp32."""


@dataclass(frozen=True)
class Spread:
    """How a matrix lies on ranks."""

    shape: tuple[int, int]
    parts: int
    """Different parts."""
    holders: int
    """Ranks that hold one of them."""
    ranks: int
    """Ranks over which the matrices of its kind are spread; each has as many to do."""

    @property
    def numbers(self) -> int:
        """All of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def sent(self) -> float:
        """Numbers that all send: parts but the owner's go to it, and everyone's but its come."""
        return self.numbers * ((1 - 1 / self.parts) + (self.holders - 1) / self.parts)


def spread(model: Transformer, layout: Layout, *, sharded: bool) -> Counter[Spread]:
    """The matrices that the ranks with the weights of this one hold, and how many alike.

    model: the part of this rank, not cut by FSDP; `sharded` says that it would be.
    """
    return Counter(
        matrix
        for name, weight in hidden_weights(model).items()
        for matrix in (
            _of_experts(model, weight, layout, sharded)
            if STACKED_EXPERTS.search(name)
            else _of_linear(weight, layout, sharded)
        )
    )


def sent_bytes(matrices: Mapping[Spread, int]) -> float:
    """Bytes that a rank sends in a step."""
    return NUMBER * sum(matrix.sent * count / matrix.ranks for matrix, count in matrices.items())


def update_bytes(matrices: Mapping[Spread, int], *, cuda: bool) -> float:
    """Most bytes that a rank takes beside weights, gradients and moments, in its first round."""
    alone = {m: n for m, n in matrices.items() if m.holders == 1}
    shared = {m: n for m, n in matrices.items() if m.holders > 1}
    work = _work(alone, 1.0, cuda)
    if not shared:
        return work
    every = sum(m.numbers * n / m.ranks for m, n in shared.items())
    largest = max(m.numbers for m in shared)
    # An owner has a share of the round, of one matrix at least.
    owned = max(min(every, ROUND_NUMBERS), largest)
    part = min(1.0, owned / every)
    here = part * sum(m.numbers * n * m.holders / m.parts / m.ranks for m, n in shared.items())
    given = max(here, max(m.numbers * m.holders / m.parts for m in shared))
    made = _work(shared, part, cuda)
    return max(work, NUMBER * owned + max(NUMBER * 2 * owned, made, NUMBER * (given + here)))


def _work(matrices: Mapping[Spread, int], part: float, cuda: bool) -> float:
    """Most bytes of making a rank's share of matrices, or a part of it, orthogonal."""
    shapes: Counter[tuple[int, int]] = Counter()
    for matrix, count in matrices.items():
        shapes[matrix.shape] += -(-count // matrix.ranks)
    return max(
        (working_bytes(s, max(1, round(part * n)), cuda=cuda) for s, n in shapes.items()),
        default=0,
    )


def _of_experts(
    model: Transformer, weight: HiddenWeight, layout: Layout, sharded: bool
) -> Iterator[Spread]:
    """Experts are cut by etp, and by FSDP only where they do not divide, as in `parallel.fsdp`."""
    copies, parts = layout.expert_replicas, layout.etp
    ranks = holders = copies * parts
    cut = len(model.local_experts) % copies and model.config.width % copies == 0
    if sharded and cut:
        parts = holders
    elif sharded:
        holders = parts
    for box in weight.matrices:
        yield Spread(_shape(box), parts, holders, ranks)


def _of_linear(weight: HiddenWeight, layout: Layout, sharded: bool) -> Iterator[Spread]:
    """Of one weight: cut by tp where a matrix crosses ranks, and by FSDP in runs of rows."""
    everywhere = weight.here.shape == weight.here.whole
    rows = -(-weight.here.shape[0] // layout.dp)
    for box in weight.matrices:
        here = box.overlap(weight.here)
        if here is None:
            continue
        parts = layout.tp if here.shape != box.shape else 1
        ranks = layout.dp * (layout.tp if everywhere else parts)
        if not sharded:
            yield Spread(_shape(box), parts, ranks, ranks)
            continue
        within = here.within(weight.here)
        first, last = within.start[0], within.start[0] + within.shape[0] - 1
        runs = last // rows - first // rows + 1
        same = layout.tp if everywhere else 1
        yield Spread(_shape(box), parts * runs, parts * runs * same, ranks)


def _shape(box: Box) -> tuple[int, int]:
    rows, columns = box.shape[-2:]
    return rows, columns
