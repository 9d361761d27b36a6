"""Tensor, sequence and vocabulary parallelism: what of a weight and of a sequence a rank holds.

The ranks of a tensor-parallel group compute the same sequences. Between blocks each holds a run of
consecutive positions of every one (Korthikanti et al. 2022). A block that is split by columns
gathers the sequences first, and its sums over columns are summed over ranks while they are
scattered back; backward, each is the other. What every rank would hold alike (norms, router, the
low-rank projections of MLA) sees its own positions only, so its gradient is a sum over ranks. Any
length, width and vocabulary works: the first ranks hold one more where it does not divide, and
what fills messages up to one size is cut off again where they arrive.

Letters: R ranks, B sequences, S positions, s of them here, `...` any shape.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Cut:
    """Which part of a whole tensor is here: `length` of `whole` along `dim`, from `start`."""

    dim: int
    start: int
    length: int
    whole: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the whole tensor that is here."""
        return tensor.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Stack:
    """Matrices that lie in one weight, one after another along `dim`, of these lengths there."""

    dim: int
    lengths: tuple[int, ...]


def local(tensor: Tensor) -> Tensor:
    """What of a weight, a gradient or a moment is on this rank; it shares its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def local_range(tensor: DTensor) -> tuple[int, int, int]:
    """The dimension along which a tensor is cut, and where this rank's part starts and ends."""
    (shard,) = tensor.placements
    assert isinstance(shard, Shard)
    length, ranks = tensor.shape[shard.dim], tensor.device_mesh.size()
    start = min(tensor.device_mesh.get_local_rank() * -(-length // ranks), length)
    return shard.dim, start, start + local(tensor).shape[shard.dim]


class TensorParallel:
    """The ranks that split sequences and dense weights; without a group, one that has them whole.

    All ranks of a group call its methods in the same order. Inside `waiting` it waits for the
    others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._group, self._waiting = group, waiting
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())

    @property
    def alone(self) -> bool:
        """Whether nothing is split."""
        return self._group is None

    def lengths(self, whole: int) -> list[int]:
        """How many of `whole` consecutive things each rank holds: as even as can be."""
        each, more = divmod(whole, self.ranks)
        return [each + (rank < more) for rank in range(self.ranks)]

    def cut(self, dim: int, whole: int) -> Cut | None:
        """This rank's part of a tensor of `whole` along `dim`; None where it has it whole."""
        if self.alone:
            return None
        lengths = self.lengths(whole)
        return Cut(dim, sum(lengths[: self.rank]), lengths[self.rank], whole)

    def gather(self, x_BsH: Tensor, positions: int) -> Tensor:
        """All positions [B, S, ...] of sequences of which each rank brings its own.

        Backward, the gradients that ranks have for a position are summed where it came from.
        """
        if self.alone:
            return x_BsH
        whole: Tensor = _Gather.apply(x_BsH, self, positions)
        return whole

    def scatter_sum(self, x_BSH: Tensor) -> Tensor:
        """The sum over ranks of [B, S, ...], of which each rank gets its own positions.

        Backward, every rank gets the gradients of all positions.
        """
        if self.alone:
            return x_BSH
        part: Tensor = _ScatterSum.apply(x_BSH, self)
        return part

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds a tensor that needs no gradient over ranks, in place; returns it."""
        if self._group is not None:
            with self._waiting():
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def collect(self, x: Tensor, dim: int, whole: int) -> Tensor:
        """A whole tensor from the parts that ranks hold along `dim`; needs no gradient."""
        if self._group is None:
            return x
        lengths = self.lengths(whole)
        longest = _fill(x.movedim(dim, 0), max(lengths)).contiguous()
        out = longest.new_empty(self.ranks * longest.numel())
        with self._waiting():
            dist.all_gather_into_tensor(out, longest.flatten(), group=self._group)
        parts = out.view(self.ranks, *longest.shape)
        cut = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(cut).movedim(0, dim)

    def collect_sum(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum over ranks; needs no gradient."""
        if self._group is None:
            return x
        lengths = self.lengths(x.shape[dim])
        parts = [_fill(part, max(lengths)) for part in x.movedim(dim, 0).split(lengths)]
        out = parts[0].new_empty(parts[0].numel())
        stacked = torch.stack(parts).flatten()
        with self._waiting():
            dist.reduce_scatter_tensor(out, stacked, group=self._group)
        return out.view(parts[0].shape)[: lengths[self.rank]].movedim(0, dim)


WHOLE = TensorParallel()
"""A rank that splits neither sequences nor dense weights."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, tensor: TensorParallel, positions: int) -> Tensor:
        ctx.tensor = tensor
        return tensor.collect(x_BsH, 1, positions)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.tensor.collect_sum(grad_BSH, 1), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor, ctx.positions = tensor, x_BSH.shape[1]
        return tensor.collect_sum(x_BSH, 1)

    @staticmethod
    def backward(ctx: Any, grad_BsH: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.tensor.collect(grad_BsH, 1, ctx.positions), None


def _fill(part: Tensor, length: int) -> Tensor:
    """A part with zeros after it along its first dimension, up to `length`."""
    missing = length - part.shape[0]
    return part if missing == 0 else torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
