"""Ranks whose summed gradients are not those of the ranks that must have the same.

After a step's gradients are added up, the ranks of a group hold the same bits, unless a memory, a
link or a kernel has changed some. The sum of those bits as integers shows it, and tells which rank
is the odd one where most agree.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_train.model import Transformer
from nmoe_train.parallel.groups import Groups
from nmoe_train.parallel.reduction import gradients_by_group


@torch.no_grad()
def differing_ranks(model: Transformer, groups: Groups) -> list[int]:
    """Ranks that differ from the others of a group of theirs; the same answer on every rank.

    Call it when gradients are added up. Of two that differ nobody knows which is right: both are
    named.
    """
    flags = [0] * groups.layout.ranks
    for group, gradients in gradients_by_group(model, groups).items():
        if group is None:
            continue
        own = checksum(list(gradients.values()))
        sums = [torch.empty_like(own) for _ in range(group.size())]
        with groups.among_peers("comparing gradients"):
            dist.all_gather(sums, own, group=group)
        members = dist.get_process_group_ranks(group)
        for place in odd_places([int(total) for total in sums]):
            flags[members[place]] = 1
    return [rank for rank, count in enumerate(groups.counts(*flags)) if count]


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of fp32 tensors, as integers, weighted by the tensors' numbers: int64 scalar."""
    return torch.stack(
        [
            (number + 1) * tensor.contiguous().view(torch.int32).sum(dtype=torch.int64)
            for number, tensor in enumerate(tensors)
        ]
    ).sum()


def odd_places(sums: Sequence[int]) -> list[int]:
    """Places of those that are not what most are; all of them where no value is that of most."""
    (usual, count), *_ = Counter(sums).most_common()
    if 2 * count <= len(sums) and count < len(sums):
        return list(range(len(sums)))
    return [place for place, total in enumerate(sums) if total != usual]
