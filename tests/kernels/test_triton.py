"""The Triton kernels on a machine without a GPU: interpreted, and compiled for those it lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nmoe_kernels.compile_check import GENERATIONS, Kernel, check, kernels

SUPPORT = Path(__file__).parents[1] / "support"
# fp16 keeps 11 bits; sums are in fp32.
TOLERANCE = 3e-3


@pytest.mark.parametrize(
    ("tokens", "width", "expert_width", "experts", "slots", "drop"),
    [
        (150, 72, 40, 3, 2, 0),  # several tiles for an expert, cut inner and outer blocks
        (20, 64, 20, 6, 3, 1),  # experts without a token, dropped slots, widths to be padded
    ],
)
def test_interpreted_it_is_the_loop_over_tokens(
    tokens: int, width: int, expert_width: int, experts: int, slots: int, drop: int
) -> None:
    sizes = map(str, (tokens, width, expert_width, experts, slots, drop))
    command = [sys.executable, str(SUPPORT / "interpreted_experts.py"), *sizes]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    errors = json.loads(result.stdout)
    assert len(errors) == 5
    assert max(errors) < TOLERANCE, errors


@pytest.mark.parametrize(
    "words",
    [
        "40 72 12 3 1 1 softmax False",  # experts and slots that are no power of two
        "40 200 16 4 4 2 sigmoid True",  # a token chooses in two groups of four
        "20 64 20 4 5 2 softmax True",  # groups that are no power of two
        "9 64 510 32 1 1 softmax True",  # the most experts and slots
        "9 64 8 2 8 4 sigmoid False",  # groups of one expert
        "9 64 6 1 1 1 softmax False",  # one slot
    ],
)
def test_interpreted_the_router_is_the_reference(words: str) -> None:
    """The words are those that the program takes."""
    command = [sys.executable, str(SUPPORT / "interpreted_router.py"), *words.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["same"] == {"ids_TK": True, "load_E": True, "invalid": True, "valid_T": True}
    assert len(found["errors"]) == 9
    # fp32 all the way.
    assert max(found["errors"].values()) < 1e-6, found["errors"]


@pytest.mark.parametrize(
    ("ranks", "experts", "slots", "width"),
    [
        (3, 9, 4, 24),  # more slots than an owner has experts, several blocks of the plan
        (1, 4, 2, 16),  # one rank
        (5, 20, 7, 33),  # a rank without a token, columns that are cut
    ],
)
def test_interpreted_the_exchange_moves_and_sums_what_it_should(
    ranks: int, experts: int, slots: int, width: int
) -> None:
    sizes = map(str, (ranks, experts, slots, width))
    command = [sys.executable, str(SUPPORT / "interpreted_exchange.py"), *sizes]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == []


@pytest.mark.slow
def test_interpreted_the_backward_holds_one_pre_activation_and_spoils_nothing() -> None:
    command = [sys.executable, str(SUPPORT / "interpreted_backward.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["held"] == {"kept": 1, "recomputed": 1, "graph kept": 2}
    assert found["again"] == 0.0 and found["checkpointed"] == 0.0
    assert "no autograd formula was registered" in found["twice"]
    assert found["checked"] == {"route": "SUCCESS", "expert_mlp": "SUCCESS"}
    assert found["compiled"] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_kernel_compiles_and_keeps_its_promises(generation: str) -> None:
    for kernel in kernels():
        found = check(kernel, generation)
        assert found.broken == [], f"{kernel.name}: {found.broken}"
        assert 0 < found.registers <= 255
        # On Hopper, where the kernels are tuned, nothing may spill.
        assert found.spilled_bytes == 0 or generation != "sm_90a", kernel.name


def test_a_broken_promise_is_found() -> None:
    scatter = next(kernel for kernel in kernels() if kernel.name == "scatter")
    promising = Kernel(**{**vars(scatter), "multiplies": True})
    found = check(promising, "sm_90a")
    assert found.broken == ["no instruction of the matrix unit", "no bulk tensor copy"]
