"""The one-sided exchange between two GPUs of one host, or two processes that share one."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUPPORT = Path(__file__).parents[1] / "support"
CHECKS = ("parity", "repeated", "layers", "captured", "beside", "late", "soak")
# bf16 rows, and bf16 sums of each owner.
TOLERANCE = 1e-2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALONE = torch.cuda.device_count() < 2
TRANSPORTS = [
    "p2p",
    pytest.param("nvshmem", marks=pytest.mark.skipif(ALONE, reason="needs a GPU for each rank")),
]


@functools.cache
def found(transport: str) -> dict:
    """What the two ranks found, all checks in one start."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program = [str(SUPPORT / "rdep_on_gpus.py"), transport, ",".join(CHECKS)]
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if ALONE else {}
    result = subprocess.run(
        [*launch, *program],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | shared,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_output_and_gradients_are_those_of_one_rank_with_all_experts(transport):
    errors = dict(found(transport)["parity"])
    errors.pop("seconds")
    assert len(errors) == 36
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hundred_runs_with_random_delays_are_bitwise_the_same(transport):
    assert found(transport)["repeated"]["different"] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_of_several_shapes_are_in_flight_at_once(transport):
    assert found(transport)["layers"]["error"] < TOLERANCE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_captured_layer_replays_on_new_tokens(transport):
    assert found(transport)["captured"]["same"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_work_beside_the_exchange_changes_nothing_and_hides_some_of_it(transport):
    found_beside = found(transport)["beside"]
    assert found_beside["same"]
    assert 0 < found_beside["hidden"] <= 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_peer_is_waited_for_and_past_the_deadline_named(transport):
    late = found(transport)["late"]
    assert late["60.0"] == ""
    assert late["1.0"].startswith("E-RDEP-LATE: rank 1 did not take part in the")
    assert "layer tested" in late["1.0"]
    assert late["1.0 took"] < 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_thousand_steps_of_changing_shapes_leak_nothing(transport):
    soak = found(transport)["soak"]
    assert len(set(soak["used"])) == 1, soak
    assert soak["error"] < TOLERANCE
    # A pool may grow once; what is left of a closed group would show twenty times.
    assert soak["free"][5] - soak["free"][-1] < 2**21, soak
