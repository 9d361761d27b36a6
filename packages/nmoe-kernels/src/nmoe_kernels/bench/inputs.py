"""Tokens and a router weight that lead to a wanted distribution over experts.

The rows of the router's weight are orthonormal directions, so a token can be given any logits: its
part in their span is replaced by the wanted one. Weight and tokens stay of unit scale and dense,
and every router of the benchmark (with softmax or sigmoid, fp32 or bf16 logits) sees the same
choice. A bias would do for us, but peers have none.

Wanted logits: uniform, Gumbel noise; zipf, Gumbel noise minus log(rank), so that an expert is a
token's first choice with probability proportional to 1 / rank; onehot, the same K experts for every
token. Which expert has which rank is drawn once.

Letters: T tokens, H width, E experts, K experts per token.
"""

import torch
from torch import Tensor

from nmoe_kernels.bench.shapes import RouterShape

ROUTINGS = ("uniform", "zipf", "onehot")
SEED = 1


def routed_tokens(
    shape: RouterShape,
    routing: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    weight_in_bf16: bool = True,
) -> tuple[Tensor, Tensor]:
    """x [T, H] in `dtype`, and the router's weight fp32 [E, H].

    weight_in_bf16: the weight has values that bf16 holds, so that a router that computes in bf16
    has the same weight as one in fp32.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    x = torch.randn(shape.tokens, shape.width, device=device, generator=generator)
    weight = _directions(shape).to(device)
    if weight_in_bf16:
        weight = weight.bfloat16().float()
    logits = _wanted_logits(shape, routing, generator)
    return (x + (logits - x @ weight.t()) @ weight).to(dtype), weight


def _directions(shape: RouterShape) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    columns = torch.linalg.qr(torch.randn(shape.width, shape.experts, generator=generator)).Q
    return columns.t().contiguous()


def _wanted_logits(shape: RouterShape, routing: str, generator: torch.Generator) -> Tensor:
    size, device = (shape.tokens, shape.experts), generator.device
    order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(SEED))
    rank = (order + 1).to(device)
    noise = torch.rand(size, device=device, generator=generator)
    if routing == "onehot":
        # A gap that no noise of [0, 1) closes.
        return noise + 4.0 * (rank <= shape.top_k)
    gumbel = -(-noise.clamp(1e-7, 1 - 1e-7).log()).log()
    return gumbel - rank.log() if routing == "zipf" else gumbel
