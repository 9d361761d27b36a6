"""Launches of the products: defaults, tuned ones kept on disk, and forced ones."""

import json
import os
import subprocess
import sys

import pytest
import torch
from nmoe_kernels import KernelError
from nmoe_kernels.bench.shapes import Shape
from nmoe_kernels.bench.tune import sizes
from nmoe_kernels.gemm.launches import (
    CANDIDATES,
    TUNING_VARIABLE,
    Launch,
    entry,
    forced,
    launch_for,
    remember,
)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
UP = entry("up", 4096, 2048)


@pytest.fixture
def file(tmp_path, monkeypatch):
    from nmoe_kernels.gemm import launches

    path = tmp_path / "folder" / "launches.json"
    monkeypatch.setenv(TUNING_VARIABLE, str(path))
    launches._tuned.cache_clear()
    yield path
    launches._tuned.cache_clear()


def test_without_a_file_the_default_is_launched(file):
    for product, candidates in CANDIDATES.items():
        assert launch_for(product, 4096, 2048, CUDA) == candidates[0]
    assert not file.exists()


def test_what_was_tuned_is_launched_for_its_sizes_alone(file):
    best = Launch(group=4, halves=True)
    assert remember({UP: best}, CUDA) == file
    assert launch_for("up", 4096, 2048, CUDA) == best
    assert launch_for("up", 4096, 1024, CUDA) == launch_for("up", 4096, 2048, CPU) == Launch()
    assert launch_for("down", 4096, 2048, CUDA) == CANDIDATES["down"][0]


def test_choices_of_other_sizes_are_kept(file):
    remember({UP: Launch(group=4)}, CUDA)
    remember({entry("down", 1024, 4096): Launch(stages=2)}, CUDA)
    assert sorted(json.loads(file.read_text())) == ["down 1024x4096", "up 4096x2048"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_tuning_can_be_turned_off(file, monkeypatch):
    remember({UP: Launch(group=4)}, CUDA)
    monkeypatch.setenv(TUNING_VARIABLE, "off")
    assert launch_for("up", 4096, 2048, CUDA) == Launch()
    with pytest.raises(KernelError, match="E-TUNING-OFF"):
        remember({UP: Launch()}, CUDA)


@pytest.mark.parametrize("text", ["{", "[]", '{"up 1x1": {"rows": 3}}', '{"up 1x1": 3}'])
def test_a_file_that_is_something_else_is_refused(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(KernelError, match=r"E-TUNING-FILE: .*launches\.json cannot be read"):
        launch_for("up", 4096, 2048, CUDA)


def test_a_file_that_cannot_be_written_is_named(file):
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(KernelError, match="E-TUNING-FILE"):
        remember({UP: Launch()}, CUDA)


def test_a_forced_launch_goes_before_a_tuned_one_and_ends_with_its_context(file):
    remember({UP: Launch(group=4)}, CUDA)
    with forced("up", Launch(stages=2)):
        with forced("down", Launch(stages=4)):
            assert launch_for("up", 4096, 2048, CUDA) == Launch(stages=2)
        assert launch_for("down", 4096, 2048, CUDA) == CANDIDATES["down"][0]
        with forced("up", Launch(stages=5)):
            assert launch_for("up", 1, 1, CPU) == Launch(stages=5)
        assert launch_for("up", 1, 1, CPU) == Launch(stages=2)
    assert launch_for("up", 4096, 2048, CUDA) == Launch(group=4)


def test_tuning_asks_for_the_sizes_that_the_layer_launches(monkeypatch):
    """Launches of one training step on the CPU's shapes, by what they ask for."""
    program = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import json, sys, torch
from nmoe_kernels.gemm import products
from nmoe_kernels.gemm.launches import launch_for
asked = set()
def noted(product, inner, columns, device):
    asked.add((product, inner, columns))
    return launch_for(product, inner, columns, device)
products.launch_for = noted
from nmoe_kernels.gemm.fused import expert_mlp
x, weights = torch.randn(3, 64).half(), torch.rand(3, 2)
gate_up, down = torch.randn(2, 48, 64).half(), torch.randn(2, 64, 24).half()
leaves = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
expert_mlp(x, torch.tensor([[0, 1]] * 3), weights, gate_up, down).sum().backward()
json.dump(sorted(asked), sys.stdout)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    assert result.returncode == 0, result.stderr[-2000:]
    shape = Shape(3, 64, 24, 2, 2)
    want = sorted([product, *sizes(product, shape)] for product in CANDIDATES)
    assert json.loads(result.stdout) == want


def test_without_a_gpu_tune_says_so_in_one_line():
    command = [sys.executable, "-m", "nmoe_kernels", "tune"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error E-BACKEND-UNAVAILABLE: nothing to tune: ")
