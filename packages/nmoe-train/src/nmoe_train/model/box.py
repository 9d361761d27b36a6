"""Boxes: which part of a tensor a rank holds, where it does not hold it whole."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from nmoe_train.model.tensor import Cut, local, local_range


@dataclass(frozen=True)
class Box:
    """From `start`, in each dimension, as far as `shape`, of a tensor of shape `whole`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the whole tensor that is in the box; it shares its memory."""
        return tensor[self.slices()]

    def slices(self) -> tuple[slice, ...]:
        """Where the box is in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Box") -> "Box | None":
        """What two boxes of one tensor have in common, if anything."""
        low = tuple(map(max, self.start, other.start))
        ends = (tuple(a + n for a, n in zip(b.start, b.shape, strict=True)) for b in (self, other))
        shape = tuple(high - a for a, high in zip(low, map(min, *ends), strict=True))
        return Box(low, shape, self.whole) if all(n > 0 for n in shape) else None

    def within(self, other: "Box") -> "Box":
        """The same place, counted from the start of a box that holds it."""
        start = tuple(a - b for a, b in zip(self.start, other.start, strict=True))
        return Box(start, self.shape, other.shape)


def whole_box(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape, shape)


def held_box(parameter: Tensor, cut: Cut | None) -> Box:
    """What of a parameter is here: of its tensor-parallel `cut`, the shard over replicas."""
    start, whole = [0] * parameter.ndim, list(parameter.shape)
    if isinstance(parameter, DTensor):
        dim, first, _ = local_range(parameter)
        start[dim] = first
    if cut is not None:
        start[cut.dim] += cut.start
        whole[cut.dim] = cut.whole
    return Box(tuple(start), tuple(local(parameter).shape), tuple(whole))
