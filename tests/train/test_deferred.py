"""Gradients of weights made later are the bits of those made at once."""

from collections.abc import Callable

import pytest
import torch
from nmoe_train.config import Config
from nmoe_train.model import Transformer
from nmoe_train.model.deferred import WeightQueue, deferring
from torch import Tensor


def gradients(
    model: Transformer, queue: WeightQueue | None
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Gradients after the backward, and after what waited is made too; of two passes."""
    tokens = torch.arange(32).view(2, 16)
    model.zero_grad()
    before: dict[str, Tensor | None] = {}
    for shift in (0, 1):
        with deferring(queue):
            output = model.hidden(tokens + shift, torch.zeros_like(tokens))
            states = output.hidden_BSH.float()
            (states.square() * torch.arange(1, 33)).mean().backward()
        if shift == 0:
            before = {n: None if p.grad is None else p.grad.clone() for n, p in named(model)}
        if queue is not None:
            queue.run()
    return before, {name: parameter.grad for name, parameter in named(model)}


def named(model: Transformer) -> list[tuple[str, torch.nn.Parameter]]:
    # The output projection takes no part in the states.
    return [(n, p) for n, p in model.named_parameters() if not n.startswith("head")]


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_same_bits_and_wait_until_they_are_asked_for(
    tiny: Callable[..., Config],
    build: Callable[..., Transformer],
    dtype: torch.dtype,
    recompute: str,
) -> None:
    model = build(tiny(**{"model.layers": 3, "train.recompute": recompute}), dtype)
    _, want = gradients(model, None)
    queue = WeightQueue()
    before, got = gradients(model, queue)
    waiting = {name for name, grad in before.items() if grad is None}
    kinds = ("attention", "mlp", "shared")
    assert waiting == {
        n for n in want if any(f".{kind}." in n for kind in kinds) and "norm" not in n
    }
    for name, grad in want.items():
        assert grad is not None and got[name] is not None
        assert torch.equal(got[name], grad), name
    assert not queue._waiting, "nothing is held for longer than it is needed"
