"""Gradients of weights made later, of what another stream has computed."""

import pytest
import torch
from nmoe_train.model.deferred import WeightQueue, deferring, linear
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 1 << 31
"""About a second: the product waits that long, and what is to disturb it does not."""


def late_gradient(beside: torch.cuda.Stream, cycles: int) -> tuple[Tensor, Tensor]:
    """The gradient that a product makes after so many cycles, and what it should be."""
    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    queue = WeightQueue()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside), deferring(queue):
        x = torch.randn(4096, 512, device="cuda")
        upstream = torch.randn(4096, 512, device="cuda")
        want = upstream.T @ x
        linear(x, weight).backward(upstream)
    torch.cuda.current_stream().wait_stream(beside)
    del x, upstream
    torch.cuda._sleep(cycles)
    queue.run()
    with torch.cuda.stream(beside):
        # All that the allocator would give away at once.
        spoilt = [torch.full((4096, 512), torch.nan, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert weight.grad is not None and len(spoilt) == 8
    return weight.grad, want


def test_memory_of_a_stream_beside_is_kept_until_the_product_has_read_it() -> None:
    beside = torch.cuda.Stream()
    # Kernels are loaded when they are first used, which may wait for those that run.
    for cycles in (1, CYCLES):
        torch.testing.assert_close(*late_gradient(beside, cycles))
