"""Gradients of weights apart from those of inputs, for pipelines that make them later.

Inside `deferring(queue)`, a linear map's backward gives the gradient of its input at once and
leaves the product for its weight in the queue. Run later, it is added to the weight's `grad`: the
same product of the same numbers. What is not a `linear` (embedding, norms, routed experts, the
output projection) makes its gradients at once, as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class WeightQueue:
    """Products that wait, each with the inputs and gradients that it needs."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def put(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Leaves the gradient of `weight` [out, in] for later: grad [..., out]^T x [..., in]."""
        self._waiting.append((weight, x, grad))

    @torch.no_grad()
    def run(self) -> None:
        """Makes all that wait and adds them to the weights' `grad`."""
        for weight, x, grad in self._waiting:
            for tensor in (x, grad):
                if tensor.is_cuda:
                    # It may have been made in a stream beside this one, and its memory must not be
                    # given away there before the product has read it.
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            product = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype)
            if weight.grad is None:
                weight.grad = product
            else:
                weight.grad += product
        self._waiting.clear()


_queue: WeightQueue | None = None


@contextmanager
def deferring(queue: WeightQueue | None) -> Iterator[None]:
    """Inside, gradients of linear weights go to the queue; None changes nothing.

    The forward and the backward of a micro-batch must both run inside, as the backward may compute
    layers again.
    """
    global _queue
    before, _queue = _queue, queue
    try:
        yield
    finally:
        _queue = before


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T for x [..., in] and a weight [out, in] that is cast to the format of x."""
    if _queue is None or not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype))
    y: Tensor = _Linear.apply(x, weight, _queue)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved: from a replay by activation checkpointing would come an alias, not the leaf.
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.queue.put(ctx.weight, x, grad)
        return grad @ ctx.weight.to(grad.dtype), None, None
