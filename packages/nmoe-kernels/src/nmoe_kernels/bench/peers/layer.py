"""What an adapter makes of a peer."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def as_given(router: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights that a peer takes as they are."""
    return router, gate_up, down


@dataclass(frozen=True)
class PeerLayer:
    """A peer on a problem's weights.

    run: x [T, H] -> y [T, H], differentiable. choose: x -> the ids [T, K] that `run` goes through.
    weights: its leaves for the router, gate_up and down, in its own dtype and order. restore: from
    their gradients to those of the problem's weights.
    """

    run: Callable[[Tensor], Tensor]
    choose: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, Tensor, Tensor]
    restore: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = as_given

    def outputs(self, x: Tensor, grad: Tensor) -> list[Tensor]:
        """y and the gradients of x, router, gate_up and down, as the problem lays them."""
        y = self.run(x)
        grad_x, *grads = torch.autograd.grad(y, (x, *self.weights), grad)
        return [y.detach(), grad_x, *self.restore(*grads)]


def missing(modules: Sequence[str]) -> str:
    """ "" if all these modules can be found, or which ones cannot."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def gpu_refusal(device: str, dtype: torch.dtype) -> str:
    """ "" for 16-bit floats on CUDA, or why not."""
    if device != "cuda":
        return f"it runs on cuda, not on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes 16-bit floats"
    return ""
