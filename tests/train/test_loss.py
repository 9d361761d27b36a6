"""Chunked cross-entropy against torch's own in fp64: the loss and both gradients."""

import math
from typing import Any

import pytest
import torch
from nmoe_train.model import chunked_cross_entropy
from nmoe_train.model.loss import IGNORED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, WIDTH, VOCABULARY = 37, 24, 50


def inputs(
    ignored: float = 0.3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=draw) / 2).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    drop = torch.rand(TOKENS, generator=draw) < ignored
    return hidden, weight, targets.masked_fill(drop, IGNORED)


def truth(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients by torch in fp64, from the very numbers given."""
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(
        h @ w.T, targets, ignore_index=IGNORED, reduction="sum"
    )
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


def error(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("chunk", [1, 7, TOKENS - 1, TOKENS, 1000])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_the_whole_logits(chunk: int, ignored: float) -> None:
    hidden, weight, targets = inputs(ignored)
    want_loss, want_hidden, want_weight = truth(hidden, weight, targets)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
    # Another factor than 1, as the division by the count of predictions is.
    (loss * 0.25).backward()
    assert loss.dtype == torch.float32
    assert error(loss.detach(), want_loss) < 1e-6
    assert error(hidden.grad, want_hidden * 0.25) < 1e-5
    assert error(weight.grad, want_weight * 0.25) < 1e-5


def test_ignored_targets_get_no_gradient_at_all() -> None:
    hidden, weight, targets = inputs(0.5)
    chunked_cross_entropy(hidden, weight, targets, chunk=7).backward()
    assert hidden.grad is not None
    zero_rows = hidden.grad.abs().sum(1) == 0
    assert torch.equal(zero_rows, targets == IGNORED)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_with_nothing_to_predict_loss_and_gradients_are_zero(chunk: int) -> None:
    hidden, weight, targets = inputs(1.1)
    assert bool((targets == IGNORED).all())
    loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(0.0)
    loss = chunked_cross_entropy(hidden * 1e3, weight, targets, chunk=7)
    want = truth(hidden * 1e3, weight, targets)[0]
    assert error(loss.detach(), want) < 1e-5


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    hidden, weight, targets = inputs(0.0)
    loss = chunked_cross_entropy(hidden * 0, weight, targets, chunk=7)
    assert loss.item() == pytest.approx(TOKENS * math.log(VOCABULARY), rel=1e-6)


def test_bf16_states_give_fp32_weight_gradients() -> None:
    hidden, weight, targets = inputs(0.3, torch.bfloat16)
    want_loss, want_hidden, want_weight = truth(hidden, weight, targets)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk=7)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    # bf16 keeps 8 bits: 2**-8 a product, averaged over the sums.
    assert error(loss.detach(), want_loss) < 5e-3
    assert error(hidden.grad, want_hidden) < 1e-2
    assert error(weight.grad, want_weight) < 1e-2


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        quiet = chunked_cross_entropy(hidden, weight, targets, chunk=7)
    assert torch.equal(quiet, chunked_cross_entropy(hidden, weight, targets, chunk=7).detach())


def products(grad: bool) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a loss makes, by the system's own record of its operations."""
    hidden, weight, targets = inputs()
    shapes: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                shapes.append(tuple(out.shape))
            return out

    with torch.set_grad_enabled(grad), Watch():
        loss = chunked_cross_entropy(hidden, weight, targets, chunk=7)
    assert (loss.grad_fn is not None) == grad
    return shapes


def test_without_gradients_none_are_made() -> None:
    for shape in ((VOCABULARY, WIDTH), (TOKENS, WIDTH)):
        assert shape in products(grad=True)
        assert shape not in products(grad=False)


def test_a_leaf_that_wants_no_gradient_costs_none() -> None:
    hidden, weight, targets = inputs()
    loss = chunked_cross_entropy(hidden.detach(), weight.detach(), targets, chunk=7)
    assert not loss.requires_grad


@pytest.mark.parametrize("count", [3, 1987])
def test_in_bf16_both_gradients_carry_the_same_unrounded_factor(count: int) -> None:
    # 1 / 1987 lies between two numbers of bf16, 0.2 % from the nearer one.
    plain, divided = inputs(0.3, torch.bfloat16), inputs(0.3, torch.bfloat16)
    chunked_cross_entropy(*plain, chunk=7).backward()
    (chunked_cross_entropy(*divided, chunk=7) / count).backward()
    factor = torch.tensor(1.0) / count
    assert float(factor.bfloat16()) != float(factor)
    for whole, part in zip(plain[:2], divided[:2], strict=True):
        assert whole.grad is not None and part.grad is not None
        assert torch.equal(part.grad, (whole.grad.float() * factor).to(part.dtype))


def test_one_input_may_be_constant() -> None:
    hidden, weight, targets = inputs()
    _, want_hidden, want_weight = truth(hidden, weight, targets)
    chunked_cross_entropy(hidden, weight.detach(), targets, chunk=7).backward()
    assert error(hidden.grad, want_hidden) < 1e-5
    chunked_cross_entropy(hidden.detach(), weight, targets, chunk=7).backward()
    assert error(weight.grad, want_weight) < 1e-5
