"""The router alone: the fused kernels, eager PyTorch, and PyTorch compiled.

Forward gives ids, weights, logits and the load; "both" adds the gradients of x and of the weight
for a random gradient of the weights. FLOPs are those of x W^T; bytes those of x, W, ids and
weights. The ceiling of the forward is a read of x, by the fastest of a few ways.

Letters: T tokens, H width, E experts, K experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nmoe_kernels.bench.inputs import routed_tokens
from nmoe_kernels.bench.measure import (
    TOLERANCE,
    Contender,
    Cost,
    Measurement,
    measure,
    relative_error,
)
from nmoe_kernels.bench.peers.plain import why_not_compiled
from nmoe_kernels.bench.problem import is_choice
from nmoe_kernels.bench.shapes import RouterShape
from nmoe_kernels.bench.timing import time_together
from nmoe_kernels.hardware import why_unusable
from nmoe_kernels.router import RouterConfig, Routing, route
from nmoe_kernels.router.reference import choice_weights, route_reference

Score = Literal["softmax", "sigmoid"]

CONTENDERS = ("triton", "reference", "compiled")
# All is computed in fp32, whatever the dtype of x; the gradient of x is then rounded to it.
ROUTER_TOLERANCE = 1e-4
CHOICE_SLACK = 2.0**-12


@dataclass
class RouterProblem:
    """x [T, H], weight fp32 [E, H], and the gradient of the weights fp32 [T, K]."""

    shape: RouterShape
    config: RouterConfig
    x: Tensor
    weight: Tensor
    grad: Tensor

    def error(self, routing: Routing) -> float:
        """Greatest relative error of logits, weights and the weight's gradient against fp64.

        Infinite for a choice that fp64 would not make, for a wrong load, and for a gradient of x
        beyond the tolerance of its dtype.
        """
        ids = routing.ids_TK
        x, weight = (t.detach().double().requires_grad_() for t in (self.x, self.weight))
        logits = x @ weight.t()
        if not is_choice(ids, logits.detach(), self.config, CHOICE_SLACK):
            return float("inf")
        load = torch.bincount(ids.flatten(), minlength=self.config.experts)
        scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
        weights = choice_weights(scores, ids, self.config)
        want = torch.autograd.grad(weights, (x, weight), self.grad.double())
        got = torch.autograd.grad(routing.weights_TK, (self.x, self.weight), self.grad)
        off_x = relative_error(got[:1], want[:1])
        if off_x > TOLERANCE[self.x.dtype] or not torch.equal(load, routing.load_E):
            return float("inf")
        found = (routing.logits_TE.detach(), routing.weights_TK.detach(), got[1])
        return relative_error(found, (logits.detach(), weights.detach(), want[1]))


def measure_router(
    shape: RouterShape,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    contenders: Sequence[str] = CONTENDERS,
    repeats: int = 20,
    score: Score = "softmax",
) -> list[Measurement]:
    """Verifies and times each router on one shape and routing."""
    problem = router_problem(shape, routing, dtype, device, score)
    found = [router_contender(name, problem) for name in contenders]
    found.append(_read(problem.x.detach(), repeats))
    label = (str(shape), routing)
    return measure(found, costs(shape, dtype), label, dtype, device, repeats, ROUTER_TOLERANCE)


def router_problem(
    shape: RouterShape, routing: str, dtype: torch.dtype, device: torch.device, score: Score
) -> RouterProblem:
    """Tokens that follow a routing, and a weight with all the bits of fp32."""
    x, weight = routed_tokens(shape, routing, device, dtype, weight_in_bf16=False)
    config = RouterConfig(
        shape.experts, shape.top_k, "softmax" if score == "softmax" else "sigmoid"
    )
    grad = torch.randn(shape.tokens, shape.top_k, device=device)
    return RouterProblem(shape, config, x.requires_grad_(), weight.requires_grad_(), grad)


def router_contender(name: str, problem: RouterProblem) -> Contender:
    """A router by name, on a problem; one that cannot run says why."""
    device, dtype = problem.x.device.type, problem.x.dtype
    if name == "triton":
        absent = why_unusable("triton", device, dtype) or ""
        absent = absent or ("" if dtype == torch.bfloat16 else "its tokens are bfloat16")
        choose: Callable[..., Routing] = partial(route, backend="triton")
    elif name == "compiled":
        absent = why_not_compiled(device, dtype)
        torch.compiler.reset()
        choose = torch.compile(route_reference, dynamic=False)
    else:
        absent, choose = "", route_reference
    if absent:
        return Contender(name, absent=absent)
    inputs = (problem.x, problem.weight)

    def run() -> Routing:
        return choose(*inputs, problem.config)

    def forward() -> Routing:
        with torch.no_grad():
            return run()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run().weights_TK, inputs, problem.grad)

    def error() -> float:
        quiet, routing = forward(), run()
        # Without gradients a router may take another path.
        if not torch.equal(quiet.ids_TK, routing.ids_TK):
            return float("inf")
        apart = relative_error([quiet.weights_TK], [routing.weights_TK.detach()])
        return max(problem.error(routing), apart)

    held = sum(tensor.nbytes for tensor in (*inputs, problem.grad))
    return Contender(name, {"forward": forward, "both": both}, error, held)


def costs(shape: RouterShape, dtype: torch.dtype) -> dict[str, Cost]:
    """What each pass must do."""
    flops = 2.0 * shape.tokens * shape.width * shape.experts
    x = 1.0 * shape.tokens * shape.width * dtype.itemsize
    weight, chosen = 4.0 * shape.experts * shape.width, 12.0 * shape.tokens * shape.top_k
    return {
        "forward": Cost(flops, x + weight + chosen),
        # The backward reads x, W, ids and the gradient of the weights, and writes two gradients.
        "both": Cost(3 * flops, 3 * x + 3 * weight + 2 * chosen),
    }


def _read(x: Tensor, repeats: int) -> Contender:
    """The fastest of a few ways to read x once."""
    ways: dict[str, Callable[[], object]] = {"sum": x.sum, "amax": x.amax}
    if why_unusable("triton", x.device.type, torch.bfloat16) is None:
        from nmoe_kernels.bench.read import reading

        ways["a kernel"] = reading(x)
    times = time_together(ways, x.device, min(repeats, 10))
    best = min(ways, key=lambda way: times[way].ms)
    note = f"ceiling: x read once, by {best}"
    return Contender("read_x", {"forward": ways[best]}, note=note, is_ceiling=True)
