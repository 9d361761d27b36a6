"""One layer to compute: tokens, weights and the gradient of its output, and its truth in fp64.

Letters: T tokens, H width, I expert width, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe_kernels.bench.inputs import routed_tokens
from nmoe_kernels.bench.measure import relative_error
from nmoe_kernels.bench.shapes import Shape
from nmoe_kernels.gemm import reference
from nmoe_kernels.grouping import group_rows
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router.reference import choice_weights

# How far, as a part of the greatest logit, a chosen expert may be below one that was not chosen:
# four times the rounding of a bf16 logit. Tokens are given exact logits, so more is a wrong choice.
CHOICE_SLACK = 2.0**-6


@dataclass
class Problem:
    """x and grad [T, H], router fp32 [E, H], gate_up [E, 2*I, H] and down [E, H, I].

    Softmax scores, the best K, weights renormalised: what every peer can do.
    """

    shape: Shape
    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor
    known: tuple[Tensor, list[Tensor]] | None = None
    """The last choice of experts that was asked for, and what follows from it in fp64."""

    @property
    def config(self) -> RouterConfig:
        """What the router is told."""
        return RouterConfig(self.shape.experts, self.shape.top_k, "softmax")

    @property
    def held_bytes(self) -> int:
        """Bytes of the inputs and the gradient of the output."""
        tensors = (self.x, self.router, self.gate_up, self.down, self.grad)
        return sum(tensor.nbytes for tensor in tensors)

    def error(self, ids_TK: Tensor, got: Sequence[Tensor]) -> float:
        """Greatest relative error of the output and of the gradients of x, router, gate_up, down.

        The truth goes through the experts `ids_TK` that the contender chose, so that formats are
        compared and not near ties; a choice that fp64 would not make is infinitely wrong.
        """
        logits = self.x.detach().double() @ self.router.double().t()
        if not is_choice(ids_TK, logits, self.config, CHOICE_SLACK):
            return float("inf")
        return relative_error(got, self._truth(ids_TK.long()))

    def _truth(self, ids_TK: Tensor) -> list[Tensor]:
        if self.known is None or not torch.equal(self.known[0], ids_TK):
            # Let go first: in fp64 two of them may not fit beside what makes the second.
            self.known = None
            self.known = ids_TK, _layer_in_fp64(self, ids_TK)
        return self.known[1]


def is_choice(ids_TK: Tensor, logits_TE: Tensor, config: RouterConfig, slack: float) -> bool:
    """Whether the ids are K distinct experts of the best logits, near ties aside.

    slack: how far a chosen expert may be below one that was not, as a part of the greatest logit.
    """
    ids = ids_TK.long()
    if ids.shape != (logits_TE.shape[0], config.top_k):
        return False
    if bool(((ids < 0) | (ids >= config.experts)).any()):
        return False
    chosen = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, ids, True)
    worst = logits_TE.masked_fill(~chosen, torch.inf).amin(1)
    best_left = logits_TE.masked_fill(chosen, -torch.inf).amax(1)
    close = best_left - worst <= slack * logits_TE.abs().amax(1)
    return bool((close & (chosen.sum(1) == config.top_k)).all())


def layer_problem(shape: Shape, routing: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random tokens that follow a routing, weights of unit gain, and a random gradient."""
    x, router = routed_tokens(shape.router, routing, device, dtype)
    generator = torch.Generator(device).manual_seed(2)

    def normal(*size: int, scale: float) -> Tensor:
        values = torch.empty(size, device=device, dtype=dtype)
        return values.normal_(std=scale, generator=generator)

    return Problem(
        shape=shape,
        x=x.requires_grad_(),
        router=router,
        gate_up=normal(shape.experts, 2 * shape.expert_width, shape.width, scale=shape.width**-0.5),
        down=normal(shape.experts, shape.width, shape.expert_width, scale=shape.expert_width**-0.5),
        grad=normal(shape.tokens, shape.width, scale=1.0),
    )


def _layer_in_fp64(problem: Problem, ids_TK: Tensor) -> list[Tensor]:
    given = (problem.x, problem.router, problem.gate_up, problem.down)
    x, router, gate_up, down = (tensor.detach().double().requires_grad_() for tensor in given)
    scores = (x @ router.t()).softmax(-1)
    weights = choice_weights(scores, ids_TK, problem.config)
    y = reference.expert_mlp(x, group_rows(ids_TK, problem.shape.experts), weights, gate_up, down)
    grads = torch.autograd.grad(y, (x, router, gate_up, down), problem.grad.double())
    return [y.detach(), *grads]
