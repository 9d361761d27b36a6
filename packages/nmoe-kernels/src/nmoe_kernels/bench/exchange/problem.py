"""What is exchanged in the benchmark of the transports: tokens of one rank, their experts, weights.

Every rank draws its own tokens. uniform: experts at random; zipf: with probability proportional to
1 / rank; onehot: the same K experts for all, spread over the owners.

Letters: R ranks, T tokens of each rank, H width, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe_kernels.bench.shapes import RouterShape


@dataclass(frozen=True)
class Exchange:
    """x [T, H], ids [T, K] int64 and weights [T, K] fp32 of this rank."""

    shape: RouterShape
    x: Tensor
    ids: Tensor
    weights: Tensor

    def wanted(self) -> Tensor:
        """fp64 [T, H]: what comes back when the experts are the identity, weighted."""
        return self.x.double() * self.weights.double().sum(1, keepdim=True)


def most_crossing(rows_RR: Tensor) -> int:
    """The most rows that a rank sends to others or gets from them: for whom all others wait.

    rows [R, R]: how many rows each rank has for each; those that stay at their rank do not cross.
    """
    crossing_RR = rows_RR - rows_RR.diag().diag()
    return int(torch.maximum(crossing_RR.sum(0), crossing_RR.sum(1)).max())


def draw_exchange(
    shape: RouterShape, routing: str, rank: int, device: torch.device, dtype: torch.dtype
) -> Exchange:
    """The tokens of a rank; the same on every run."""
    generator = torch.Generator(device).manual_seed(1 + rank)
    size = (shape.tokens, shape.experts)
    x = torch.randn(shape.tokens, shape.width, device=device, generator=generator).to(dtype)
    noise = torch.rand(size, device=device, generator=generator).clamp(1e-7, 1 - 1e-7)
    gumbel = -(-noise.log()).log()
    place = torch.arange(shape.experts, device=device)
    # The ranks of experts are spread over the owners, and are the same on every rank.
    place = place[torch.randperm(shape.experts, generator=torch.Generator().manual_seed(1))]
    if routing == "zipf":
        gumbel = gumbel - (place + 1.0).log()
    if routing == "onehot":
        gumbel = gumbel + 1e3 * (place < shape.top_k)
    scores, ids = gumbel.topk(shape.top_k, dim=-1)
    return Exchange(shape, x, ids, torch.softmax(scores.float(), dim=-1))
