"""Routings and layers for the tests of expert parallelism, the same in every process.

Letters: T tokens, K experts per token, E experts, H width, I expert width.
"""

from dataclasses import dataclass

import torch
from nmoe_kernels import Routing
from torch import Tensor

WIDTH, INNER = 16, 8


def random_ids(
    tokens: int, experts: int, slots: int, kind: str, seed: int, dropped: float = 0.0
) -> Tensor:
    """int64 [T, K], distinct in a row. kind: uniform, zipf (expert e by 1 / (e + 1)), or one-hot
    (the same experts for every token). dropped: the share of ids that become E."""
    generator = torch.Generator().manual_seed(seed)
    popularity = {"uniform": torch.ones(experts), "zipf": 1 / torch.arange(1.0, experts + 1)}
    noise = torch.rand(tokens, experts, generator=generator).clamp_min(1e-30)
    if kind == "one-hot":
        ids = torch.arange(experts - slots, experts).flip(0).expand(tokens, slots)
    else:
        # The smallest of exponentials with these rates: draws without replacement.
        ids = (-noise.log() / popularity[kind]).topk(slots, largest=False).indices
    lost = torch.rand(tokens, slots, generator=generator) < dropped
    return ids.masked_fill(lost, experts)


@dataclass
class Problem:
    """All tokens of all ranks, the experts of all ranks, and the gradient of y."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor


def make_problem(
    tokens: list[int],
    experts: int,
    slots: int,
    kind: str,
    dtype: torch.dtype,
    seed: int = 0,
    dropped: float = 0.0,
) -> Problem:
    """Unit-scale inputs; weights of a token sum to 1."""
    total = sum(tokens)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    return Problem(
        x=normal(total, WIDTH),
        ids=random_ids(total, experts, slots, kind, seed + 1, dropped),
        weights=torch.randn(total, slots, generator=generator).softmax(-1),
        gate_up=normal(experts, 2 * INNER, WIDTH, scale=WIDTH**-0.5),
        down=normal(experts, WIDTH, INNER, scale=INNER**-0.5),
        grad=normal(total, WIDTH),
    )


def share(problem: Problem, tokens: list[int], rank: int) -> Problem:
    """What one rank has of a problem: its tokens and its experts."""
    start = sum(tokens[:rank])
    mine = slice(start, start + tokens[rank])
    local = problem.gate_up.shape[0] // len(tokens)
    owned = slice(rank * local, (rank + 1) * local)
    return Problem(
        problem.x[mine], problem.ids[mine], problem.weights[mine],
        problem.gate_up[owned], problem.down[owned], problem.grad[mine],
    )  # fmt: skip


def as_routing(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """A routing that says what it is told."""
    tokens = ids.shape[0]
    kept = ids[ids < experts]
    return Routing(
        ids_TK=ids,
        weights_TK=weights,
        logits_TE=torch.zeros(tokens, experts),
        score="sigmoid",
        load_E=torch.bincount(kept, minlength=experts),
        invalid=torch.tensor(0),
        valid_T=torch.ones(tokens, dtype=torch.bool),
        dropped=(ids == experts).sum(),
    )
