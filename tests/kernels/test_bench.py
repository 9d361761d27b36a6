"""The benchmark times what it has verified, and says why where it does not."""

import json
import math
from pathlib import Path

import pytest
import torch
from nmoe_kernels.bench import Shape, measure_moe
from nmoe_kernels.bench import moe as bench
from nmoe_kernels.bench.command import run_moe
from nmoe_kernels.errors import KernelError

SMALL = Shape(64, 32, 16, 8, 2)


@pytest.mark.parametrize("routing", bench.ROUTINGS)
def test_backends_are_verified_and_timed(routing: str) -> None:
    rows = list(measure_moe(SMALL, routing, torch.float32, torch.device("cpu"), repeats=2))
    by_name = {row.backend: row for row in rows}
    assert by_name["triton"].forward_ms is None and "cuda" in by_name["triton"].note
    for name in ("torch", "reference"):
        row = by_name[name]
        assert 0 < row.error < 1e-5
        assert row.forward_ms and row.both_ms and row.both_ms > row.forward_ms
        flops = 6 * 64 * 2 * 32 * 16
        assert row.forward_tflops == pytest.approx(flops / row.forward_ms / 1e9)
        assert row.both_tflops == pytest.approx(3 * flops / row.both_ms / 1e9)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TOLERANCE, torch.float32, 1e-12)
    (row,) = measure_moe(SMALL, "uniform", torch.float32, torch.device("cpu"), ["torch"], 1)
    assert row.forward_ms is None
    assert row.note.startswith("wrong")


def test_onehot_sends_every_token_to_the_same_experts() -> None:
    layer = bench._skewed_layer(SMALL, "onehot", torch.device("cpu"))
    load = layer.router(torch.randn(64, 32)).load_E
    assert load.tolist() == [64, 64, 0, 0, 0, 0, 0, 0]


def test_the_figures_are_written_with_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    run_moe("cpu", ["64,32,16,8,2"], "uniform", "float32", "torch", 1, file)
    report = json.loads(file.read_text())
    assert report["hardware"]["torch"] == torch.__version__
    (row,) = report["rows"]
    assert row["backend"] == "torch" and math.isfinite(row["error"])


@pytest.mark.parametrize(
    ("shape", "routing", "dtype", "backends"),
    [
        ("64,32", "uniform", "float32", None),
        ("64,32,16,8,x", "uniform", "float32", None),
        (str(SMALL), "skewed", "float32", None),
        (str(SMALL), "uniform", "int8", None),
        (str(SMALL), "uniform", "float32", "magic"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    shape: str, routing: str, dtype: str, backends: str | None
) -> None:
    with pytest.raises(KernelError, match="E-BENCH"):
        run_moe("cpu", [shape], routing, dtype, backends, 1, None)
