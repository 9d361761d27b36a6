"""The `cute` backend without a GPU: what it launches compiles, and how a launch is chosen."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("quack") is None:
    pytest.skip("needs nmoe-kernels[cute]", allow_module_level=True)

from nmoe_kernels.gemm import cute

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_every_launch_compiles_for_hopper(tmp_path):
    environment = {**os.environ, "QUACK_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SUPPORT / "compiled_cute.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    want = {name: [repr(launch) for launch in kept] for name, kept in cute.LAUNCHES.items()}
    assert json.loads(result.stdout.splitlines()[-1]) == want


@pytest.mark.parametrize(
    ("product", "columns", "number"),
    [
        ("down", 4096, 0),  # 22 tiles of 192 go in pairs
        ("down", 2048, 1),  # 11 do not
        ("down", 192, 1),
        ("grad_x", 1536, 0),
        ("grad_gate_up", 2048, 0),  # 13 tiles of 160 cover 2080
        ("grad_gate_up", 512, 1),  # 4 cover 640
        ("up", 40, 0),
    ],
)
def test_the_first_launch_that_fits_is_taken(product, columns, number):
    assert cute.cute_launch(product, columns) == cute.LAUNCHES[product][number]
