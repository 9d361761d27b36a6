"""Whole matrices from the parts that ranks of a stage hold, each with one of them for a moment.

Muon makes matrices orthogonal, which a part of one cannot tell. The ranks of a pipeline stage say
once which part of which matrix each holds. Then every matrix that several hold has an owner among
them, chosen so that all have as much to do. In a step each part goes to the owner, from the nearest
rank that has it, the owner does its work once, and each holder gets its part of the result: two
messages from any rank to any other, however many matrices. So copies stay alike to the bit. What
one rank alone holds it does alone. Matrices are taken in rounds, which bound what an owner brings
together; results come for all that a rank holds of a round, and to many copies of a matrix they go
in one message (`plan.weights` counts the memory).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_train.model import Transformer
from nmoe_train.model.box import Box
from nmoe_train.model.matrices import HiddenWeight, hidden_weights
from nmoe_train.optim.muon import OnStack, replace
from nmoe_train.parallel.groups import Groups

ROUND_NUMBERS = 1 << 24
"""Numbers of matrices that each rank owns in a round, about: 64 MiB of fp32."""

Key = tuple[str, tuple[int, ...]]
"""A matrix: the name of its weight, and where it starts in it."""


@dataclass
class _Shared:
    """A matrix that several ranks hold: boxes of it, by rank of the stage."""

    key: Key
    held: dict[int, Box] = field(default_factory=dict)
    owner: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.held.values())).whole

    @property
    def numbers(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def work(self) -> int:
        """Multiplications of a product with its own transpose."""
        return self.numbers * min(self.shape[-2:])

    @cached_property
    def givers(self) -> dict[int, Box]:
        """Ranks whose parts make up the matrix: the owner, and the nearest that has each other."""
        found: dict[Box, int] = {}
        for rank in sorted(self.held, key=lambda rank: (abs(rank - self.owner), rank)):
            found.setdefault(self.held[rank], rank)
        assert sum(torch.Size(box.shape).numel() for box in found) == self.numbers, self.key
        return {rank: box for box, rank in found.items()}


class SharedMatrices:
    """Applies functions to the matrices of a model's hidden weights; see `optim.muon`.

    The ranks of a stage make it together, of a model that is cut over them already, and call it
    together. Raises TrainError `E-PEER` when one of them is gone.
    """

    def __init__(self, model: Transformer, groups: Groups) -> None:
        self._groups, self._weights = groups, hidden_weights(model)
        self._rank = groups.layout.stage_rank
        self._places = dict(_parts_here(self._weights))
        here = {key: matrix for key, (matrix, _) in self._places.items()}
        told = [here]
        if groups.stage is not None:
            told = [{} for _ in range(groups.stage.size())]
            with groups.among_peers("telling of matrices"):
                dist.all_gather_object(told, here, group=groups.stage)
        shared: dict[Key, _Shared] = {}
        for rank, parts in enumerate(told):
            for key, box in parts.items():
                shared.setdefault(key, _Shared(key)).held[rank] = box
        self._alone = [key for key, matrix in shared.items() if list(matrix.held) == [self._rank]]
        self._shared = _with_owners(m for m in shared.values() if len(m.held) > 1)

    def __call__(self, parts: Mapping[str, Tensor], function: OnStack) -> None:
        """Puts what the function makes of every matrix in the parts here, by name of the weight."""
        replace([self._part(parts, key) for key in self._alone], function)
        for some in _rounds(self._shared, ROUND_NUMBERS * self._groups.layout.stage_ranks):
            self._share(some, parts, function)

    def _share(
        self, some: Sequence[_Shared], parts: Mapping[str, Tensor], function: OnStack
    ) -> None:
        """One round: parts to owners, the function there, parts of the results to holders."""
        rank, ranks = self._rank, range(self._groups.layout.stage_ranks)
        here = {m.key: self._part(parts, m.key) for m in some if rank in m.held}
        nothing = next(iter(parts.values())).new_empty(0)
        owned = {m.key: nothing.new_empty(m.shape) for m in some if m.owner == rank}
        self._trade(
            nothing,
            [[here[m.key] for m in some if m.owner == r and rank in m.givers] for r in ranks],
            [
                [m.givers[r].of(owned[m.key]) for m in some if m.owner == rank and r in m.givers]
                for r in ranks
            ],
        )
        replace(owned.values(), function)
        self._trade(
            nothing,
            [
                [m.held[r].of(owned[m.key]) for m in some if m.owner == rank and r in m.held]
                for r in ranks
            ],
            [[here[m.key] for m in some if m.owner == r and rank in m.held] for r in ranks],
        )

    def _trade(
        self, nothing: Tensor, sent: list[list[Tensor]], received: list[list[Tensor]]
    ) -> None:
        """Sends tensors to each rank, and fills those that come from each, in the same order."""
        counts = [[sum(t.numel() for t in some) for some in side] for side in (sent, received)]
        leaving, came = (nothing.new_empty(sum(side)) for side in counts)
        for piece, tensor in _pieces(leaving, sent):
            piece.copy_(tensor)
        with self._groups.waiting("sharing matrices"):
            dist.all_to_all_single(came, leaving, counts[1], counts[0], group=self._groups.stage)
        for piece, tensor in _pieces(came, received):
            tensor.copy_(piece)

    def _part(self, parts: Mapping[str, Tensor], key: Key) -> Tensor:
        """What of a matrix is here [r, c]; it shares the memory of the weight's part."""
        name, _ = key
        return self._places[key][1].of(self._weights[name].of(parts[name])).flatten(0, -2)


def _pieces(flat: Tensor, places: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """A flat tensor in pieces, each with the tensor whose shape it has."""
    tensors = [tensor for some in places for tensor in some]
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        yield piece.view(tensor.shape), tensor


def _parts_here(weights: Mapping[str, HiddenWeight]) -> Iterator[tuple[Key, tuple[Box, Box]]]:
    """Every matrix of which something is here: what, as a box of it and of the weight's part."""
    for name, weight in weights.items():
        for matrix in weight.matrices:
            common = matrix.overlap(weight.here)
            if common is not None:
                box = common.within(matrix)
                of_matrix = Box(box.start[-2:], box.shape[-2:], box.whole[-2:])
                yield (name, matrix.start), (of_matrix, common.within(weight.here))


def _with_owners(matrices: Iterator[_Shared]) -> list[_Shared]:
    """The matrices, the most work first, each with the holder that has the least to do so far."""
    ordered = sorted(matrices, key=lambda matrix: (-matrix.work, matrix.key))
    load: dict[int, int] = {}
    for matrix in ordered:
        matrix.owner = min(matrix.held, key=lambda rank: (load.get(rank, 0), rank))
        load[matrix.owner] = load.get(matrix.owner, 0) + matrix.work
    return ordered


def _rounds(matrices: Sequence[_Shared], numbers: int) -> Iterator[list[_Shared]]:
    """Runs of matrices of at most so many numbers, or of one that is larger."""
    some: list[_Shared] = []
    total = 0
    for matrix in matrices:
        if some and total + matrix.numbers > numbers:
            yield some
            some, total = [], 0
        some.append(matrix)
        total += matrix.numbers
    if some:
        yield some
