"""What is added over ranks in a step: gradients in flat buckets, and the step's numbers in one.

Every rank's loss is its part of a mean over the global batch, so gradients add up and are divided
by nothing. A dense weight that tensor-parallel ranks share out has its gradient from all their
tokens, and is summed over the data-parallel ranks that hold the same part; one that all hold alike
saw this rank's tokens only, and is summed over all ranks of the stage. An expert's gradient is
already the sum over the tokens of its expert-parallel group, whose ranks sent them to it, and what
is left to add are the other groups' replicas of the same expert. Where weights are sharded over
ranks (`parallel.fsdp`), the backward pass has added over those, and each has a part of the sum. In
the norm, the squares of all stages' weights add up, of which a tied embedding, that two of them
hold, counts once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from nmoe_train.model import Transformer
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.tensor import local
from nmoe_train.parallel.groups import Groups

BUCKET_NUMBERS = 1 << 24
"""Numbers that travel together: 64 MiB of fp32, enough to fill a link, little beside a model."""


@dataclass
class StepSums:
    """What a step adds up: scalars by name, and the tokens that each expert got, by layer."""

    scalars: dict[str, Tensor]
    loads: dict[int, Tensor]


@torch.no_grad()
def reduce_step(model: Transformer, sums: StepSums, groups: Groups) -> tuple[StepSums, Tensor]:
    """Adds gradients over ranks in place; returns the sums of all ranks and the gradients' norm.

    The norm (fp32 scalar) and the sums (scalars fp64, loads int64) are the same on every rank.
    """
    square = torch.zeros((), dtype=torch.float64, device=model.device)
    for group, gradients in gradients_by_group(model, groups).items():
        _reduce(list(gradients.values()), group, groups)
        counted = [gradient for name, gradient in gradients.items() if name not in model.copies]
        # Each rank's part of the square of the norm: what several hold is counted once.
        if counted:
            square += _square(counted) / (1 if group is None else group.size())
    total, square = _add_sums(sums, square, groups)
    return total, square.sqrt().float()


def _add_sums(sums: StepSums, square: Tensor, groups: Groups) -> tuple[StepSums, Tensor]:
    """One message of fp64, in which counts stay exact up to 2^53."""
    scalars = torch.stack([square, *(value.double() for value in sums.scalars.values())])
    flat = torch.cat([scalars, *(load.double() for load in sums.loads.values())])
    groups.sum_(flat)
    first, *rest = flat.split([len(scalars), *(load.numel() for load in sums.loads.values())])
    square, *values = first.unbind()
    loads = {layer: part.to(torch.int64) for layer, part in zip(sums.loads, rest, strict=True)}
    return StepSums(dict(zip(sums.scalars, values, strict=True)), loads), square


def gradients_by_group(
    model: Transformer, groups: Groups
) -> dict[ProcessGroup | None, dict[str, Tensor]]:
    """This rank's gradients by the group whose ranks have the same weights and are to add them."""
    found: dict[ProcessGroup | None, dict[str, Tensor]] = {}
    cuts = model.cuts()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} took no part in the step"
        sharded = isinstance(parameter, DTensor)
        if STACKED_EXPERTS.search(name):
            group = None if sharded else groups.replicas
        elif name in cuts:
            group = None if sharded else groups.data
        else:
            group = groups.tensor if sharded else groups.stage
        found.setdefault(group, {})[name] = local(parameter.grad)
    return found


def _reduce(gradients: Sequence[Tensor], group: ProcessGroup | None, groups: Groups) -> None:
    if group is None:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        groups.sum_within_(flat, group, "gradients")
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(
            bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
        )


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of at most BUCKET_NUMBERS numbers, or of one that is larger."""
    bucket: list[Tensor] = []
    numbers = 0
    for gradient in gradients:
        if bucket and numbers + gradient.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(gradient)
        numbers += gradient.numel()
    if bucket:
        yield bucket


def _square(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of all squares, fp64 scalar; norms are taken in fp32, tensor by tensor."""
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
