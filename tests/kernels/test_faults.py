"""Faults that a GPU shows and a CPU hides, brought about on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from nmoe_kernels import MoE, RouterConfig


@pytest.fixture
def careless_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """grouped_mm as CUDA has been seen to leave it: NaN in rows past the last offset and in the
    results of groups without rows. Gives the number of groups and rows that were spoilt.
    """
    exact, spoilt = F.grouped_mm, [0, 0]

    def careless(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = exact(left, right, offs=offs)
        if out.dim() == 3:
            empty = offs.diff(prepend=offs.new_zeros(1)) == 0
            spoilt[0] += int(empty.sum())
            return out.masked_fill(empty[:, None, None], float("nan"))
        rest = torch.arange(len(out)) >= offs[-1]
        spoilt[1] += int(rest.sum())
        return out.masked_fill(rest[:, None], float("nan"))

    monkeypatch.setattr(F, "grouped_mm", careless)
    return spoilt


@pytest.mark.parametrize("recompute", [False, True])
def test_garbage_of_idle_experts_and_dropped_rows_goes_nowhere(
    recompute: bool, careless_grouped_mm: list[int]
) -> None:
    config = RouterConfig(8, 2, "sigmoid", capacity_factor=0.75)
    layers = [MoE(16, 12, config, backend=name, recompute=recompute) for name in ("torch", None)]
    layers[1].backend = "reference"
    for layer in layers:
        layer.reset_parameters(torch.Generator().manual_seed(3))
        layer.router.bias.copy_(torch.tensor([0.2, 0, 0, 0, 0, 0, -9, -9]))
    x = torch.randn(40, 16, requires_grad=True)
    grad = torch.randn(40, 16)
    results = []
    for layer in layers:
        y, routing = layer(x)
        results.append([y, *torch.autograd.grad(y, (x, *layer.parameters()), grad)])
    lost = (routing.ids_TK == 8).sum(1)
    assert set(lost.tolist()) == {0, 1, 2}
    assert careless_grouped_mm[0] > 0 and careless_grouped_mm[1] > 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
