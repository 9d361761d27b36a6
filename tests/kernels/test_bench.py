"""The benchmarks time what they have verified, in turns, and say why where they do not."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nmoe_kernels.bench import (
    RouterShape,
    Shape,
    measure_gemm,
    measure_moe,
    measure_router,
    timing,
)
from nmoe_kernels.bench import gemm as gemm_bench
from nmoe_kernels.bench import moe as moe_bench
from nmoe_kernels.bench import router as router_bench
from nmoe_kernels.bench.first_call import first_calls
from nmoe_kernels.bench.inputs import ROUTINGS, routed_tokens
from nmoe_kernels.bench.measure import Contender, Cost, measure, relative_error
from nmoe_kernels.bench.peers import PEERS, Peer, PeerLayer, plain, sonicmoe
from nmoe_kernels.bench.problem import is_choice, layer_problem
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router.reference import route_reference
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")
SMALL = Shape(64, 32, 16, 8, 2)
SUPPORT = Path(__file__).parents[1] / "support"


def rows_of(found):
    return {row.contender: row for row in found}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_layers_are_verified_and_timed(routing: str) -> None:
    found = measure_moe(SMALL, routing, torch.float32, CPU, peers=["torch_eager"], repeats=3)
    rows = rows_of(found)
    assert rows["triton"].times == {} and "cuda" in rows["triton"].note
    flops = 6 * 64 * 2 * 32 * 16
    for name in ("torch", "reference", "torch_eager"):
        row = rows[name]
        assert 0 < row.error < 1e-5
        assert (row.shape, row.routing, row.dtype) == ("64,32,16,8,2", routing, "float32")
        assert min(row.times["both"].min_ms, row.times["forward"].min_ms) > 0
        assert row.times["both"].runs == 3
        for name_of, factor in (("forward", 1), ("both", 3)):
            ms = row.times[name_of].ms
            assert row.tflops[name_of] == pytest.approx(factor * flops / ms / 1e9)
            ceiling = rows["dense"].times[name_of].ms
            assert row.share[name_of] == pytest.approx(ceiling / ms)
    assert rows["dense"].error is None and rows["dense"].share["both"] == 1.0


def test_routers_are_verified_and_timed() -> None:
    shape = RouterShape(96, 40, 8, 3)
    for score in ("softmax", "sigmoid"):
        found = measure_router(
            shape, "zipf", torch.bfloat16, CPU, ["triton", "reference"], 2, score
        )
        rows = rows_of(found)
        assert 0 < rows["reference"].error < 1e-5
        assert rows["triton"].times == {} and "cuda" in rows["triton"].note
        assert set(rows["read_x"].times) == {"forward"}
        ratio = rows["read_x"].times["forward"].ms / rows["reference"].times["forward"].ms
        assert rows["reference"].share == {"forward": pytest.approx(ratio)}


def test_products_are_verified_and_timed() -> None:
    rows = rows_of(measure_gemm(SMALL, "zipf", torch.float32, CPU, ["grouped_mm"], 2))
    assert 0 < rows["grouped_mm"].error < 1e-5
    assert set(rows["grouped_mm"].times) == set(gemm_bench.PRODUCTS) == set(rows["dense"].times)


def test_costs_by_hand() -> None:
    # 3 tokens, width 4, expert width 5, 2 experts, 1 each; bf16 is 2 bytes.
    shape = Shape(3, 4, 5, 2, 1)
    layer = moe_bench.costs(shape, torch.bfloat16)
    weights, tokens = 2 * (2 * 5 * 4) + 2 * (4 * 5), 3 * 4
    assert layer["forward"] == Cost(3 * (2 * 4 * 10 + 2 * 5 * 4), 2 * (weights + 2 * tokens))
    assert layer["both"].flops == 3 * layer["forward"].flops
    products = gemm_bench.costs(shape, torch.bfloat16)
    assert products["up"] == Cost(2 * 3 * 4 * 10, 2 * (3 * 4 + 3 * 10 + 2 * 4 * 10))
    assert products["grad_down"] == Cost(2 * 3 * 4 * 5, 2 * (3 * 4 + 3 * 5 + 2 * 4 * 5))
    total = sum(cost.flops for cost in products.values())
    assert total == layer["both"].flops
    router = router_bench.costs(RouterShape(3, 4, 2, 1), torch.bfloat16)
    assert router["forward"] == Cost(2 * 3 * 4 * 2, 3 * 4 * 2 + 4 * 2 * 4 + 3 * 12)


def test_dense_products_have_the_flops_of_the_layer() -> None:
    products, held = gemm_bench.dense_products(SMALL, torch.zeros(1))
    costs = gemm_bench.costs(SMALL, torch.float32)
    for name, product in products.items():
        with FlopCounterMode(display=False) as counter:
            product()
        assert counter.get_total_flops() == costs[name].flops
    assert held == 4 * (128 * 32 + 128 * 32 + 32 * 32 + 128 * 16 + 16 * 32)


def faulty(problem, fault):
    """The plain layer with one thing wrong."""
    layer = plain.eager_layer(problem)
    router, gate_up, down = layer.weights
    if fault == "output":
        return dataclasses.replace(layer, run=lambda x: layer.run(x) * 1.001)
    if fault == "without gradients":
        other = lambda x: layer.run(x) * (1 if torch.is_grad_enabled() else 1.01)  # noqa: E731
        return dataclasses.replace(layer, run=other)
    if fault == "choice":
        return dataclasses.replace(layer, choose=lambda x: layer.choose(x).flip(0))
    if fault == "twice":
        return dataclasses.replace(layer, choose=lambda x: layer.choose(x)[:, :1].expand(-1, 2))
    if fault == "order of gates":
        swapped = torch.cat(gate_up.detach().chunk(2, 1)[::-1], 1).requires_grad_()
        run = lambda x: plain.plain_moe(x, router, swapped, down, 2)[0]  # noqa: E731
        return PeerLayer(run, layer.choose, (router, swapped, down))
    scale = {"router": (1.01, 1, 1), "gate_up": (1, 1.01, 1), "down": (1, 1, float("nan"))}[fault]
    restore = lambda *grads: tuple(g * s for g, s in zip(grads, scale, strict=True))  # noqa: E731
    return dataclasses.replace(layer, restore=restore)


@pytest.mark.parametrize(
    "fault",
    [
        "output",
        "without gradients",
        "choice",
        "twice",
        "order of gates",
        "router",
        "gate_up",
        "down",
    ],
)
def test_a_peer_that_is_wrong_is_said_and_not_timed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(lambda device, dtype: "", lambda problem: faulty(problem, fault), "")
    monkeypatch.setattr(moe_bench, "PEERS", {**PEERS, "odd": peer})
    found = measure_moe(SMALL, "uniform", torch.float32, CPU, ["torch"], ["odd"], 1)
    rows = rows_of(found)
    assert rows["odd"].times == {} and rows["odd"].note.startswith("wrong: the error is")
    assert rows["odd"].error > 1e-4
    assert rows["torch"].times


@pytest.mark.parametrize("fault", ["weights", "ids", "load", "logits", "x", "weight"])
def test_a_router_that_is_wrong_is_found(fault: str) -> None:
    shape = RouterShape(96, 40, 8, 3)
    problem = router_bench.router_problem(shape, "uniform", torch.float32, CPU, "sigmoid")
    assert problem.error(route_reference(problem.x, problem.weight, problem.config)) < 1e-5
    routing = route_reference(problem.x, problem.weight, problem.config)
    wrong = {
        "weights": {"weights_TK": routing.weights_TK * 1.001},
        "ids": {"ids_TK": routing.ids_TK.roll(1, 0)},
        "load": {"load_E": routing.load_E.roll(1)},
        "logits": {"logits_TE": routing.logits_TE + 0.01},
        "x": {"weights_TK": bent(routing.weights_TK, problem.x)},
        "weight": {"weights_TK": bent(routing.weights_TK, problem.weight)},
    }[fault]
    assert problem.error(dataclasses.replace(routing, **wrong)) > 1e-4


def bent(value, leaf):
    """The same values with a gradient for `leaf` that is off."""
    extra = leaf.sum() * 1e-2
    return value + (extra - extra.detach())


def test_a_choice_must_be_the_best_distinct_experts() -> None:
    config = RouterConfig(4, 2, "softmax")
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).double()
    good = [[0, 1]], [[1, 0]]
    bad = [[0, 2]], [[0, 0]], [[0, 4]], [[-1, 0]], [[0]]
    assert all(is_choice(torch.tensor(ids), logits, config, 0.01) for ids in good)
    assert not any(is_choice(torch.tensor(ids), logits, config, 0.01) for ids in bad)
    near = torch.tensor([[3.0, 2.0, 1.99, 0.0]]).double()
    assert is_choice(torch.tensor([[0, 2]]), near, config, 0.01)


def test_contenders_that_cannot_or_fail_are_named() -> None:
    def fail() -> float:
        raise RuntimeError("no such kernel\nand a long trace")

    works = {"forward": lambda: None}
    contenders = [
        Contender("gone", absent="not installed: gone"),
        Contender("broken", works, error=fail),
        Contender("odd", works, error=lambda: float("nan")),
        Contender("fine", works, error=lambda: 1e-9, note="as it is"),
    ]
    found = measure(
        contenders, {"forward": Cost(1, 1)}, ("s", "r"), torch.float32, CPU, 1, tolerance=1e-3
    )
    gone, broken, odd, fine = found
    assert (gone.note, gone.times) == ("not installed: gone", {})
    assert (broken.note, broken.times) == ("failed: RuntimeError: no such kernel", {})
    assert odd.times == {}
    assert fine.times and fine.note == "as it is" and fine.share == {}


def test_the_relative_error_is_the_worst_and_nan_is_infinite() -> None:
    one = torch.ones(4)
    assert relative_error([one, one * 1.5], [one, one]) == pytest.approx(0.5)
    assert relative_error([one * float("nan")], [one]) == float("inf")
    assert relative_error([one * 0], [one * 0]) == 0.0
    assert relative_error([one], [one * 0]) > 1e300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_follow_the_routing(dtype: torch.dtype) -> None:
    shape = RouterShape(20000, 64, 16, 2)
    config = RouterConfig(16, 1, "softmax")

    def first_choices(routing: str) -> torch.Tensor:
        x, weight = routed_tokens(shape, routing, CPU, dtype)
        assert x.dtype == dtype
        assert 0.8 < x.float().std() < 1.5
        return route_reference(x, weight, config).load_E.sort(descending=True).values

    uniform, zipf = first_choices("uniform") / 20000, first_choices("zipf") / 20000
    # Multinomial: 20,000 draws of 1/16 scatter by 0.0017.
    torch.testing.assert_close(uniform, torch.full((16,), 1 / 16), rtol=0, atol=0.01)
    harmonic = 1 / torch.arange(1, 17)
    torch.testing.assert_close(zipf, harmonic / harmonic.sum(), rtol=0, atol=0.012)
    x, weight = routed_tokens(shape, "onehot", CPU, dtype)
    load = route_reference(x, weight, RouterConfig(16, 2, "softmax")).load_E
    assert sorted(load.tolist()) == [0] * 14 + [20000] * 2


def test_the_weight_of_a_bf16_router_is_that_of_an_fp32_one() -> None:
    shape = RouterShape(8, 64, 16, 2)
    _, weight = routed_tokens(shape, "uniform", CPU, torch.float32)
    assert torch.equal(weight.bfloat16().float(), weight)
    _, weight = routed_tokens(shape, "uniform", CPU, torch.float32, weight_in_bf16=False)
    assert not torch.equal(weight.bfloat16().float(), weight)


def test_contenders_take_turns_in_a_random_order() -> None:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = timing.time_together(works, CPU, 20)
    assert calls[:6] == list("aabbcc")
    rounds = [tuple(calls[at : at + 3]) for at in range(6, 66, 3)]
    assert set(rounds) == set(itertools.permutations("abc"))
    assert all(times[name].runs == 20 for name in "abc")


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_spread_is_that_of_numpy(count: int) -> None:
    ms = np.random.default_rng(count).random(count).tolist()
    low, median, high = np.percentile(ms, [25, 50, 75])
    got = timing._summary(ms)
    want = (median, min(ms), low, high, count)
    assert dataclasses.astuple(got) == pytest.approx(want)


def test_gates_in_turns_are_what_sonicmoe_wants() -> None:
    gate_up = torch.arange(2 * 6 * 3).reshape(2, 6, 3)
    turned = sonicmoe.in_turns(gate_up)
    assert torch.equal(turned[:, ::2], gate_up[:, :3])
    assert torch.equal(turned[:, 1::2], gate_up[:, 3:])
    assert torch.equal(sonicmoe.in_halves(turned), gate_up)


@pytest.mark.parametrize("name", ["sonicmoe", "liger"])
def test_peers_say_why_they_cannot_run(name: str) -> None:
    why = PEERS[name].why_absent
    assert why("cpu", torch.bfloat16) == "it runs on cuda, not on cpu"
    assert why("cuda", torch.float32) == "it computes 16-bit floats"
    assert why("cuda", torch.bfloat16).startswith("not installed: ")


def test_a_peer_that_cannot_be_set_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(problem):
        raise ImportError("libodd.so is missing")

    monkeypatch.setattr(moe_bench, "PEERS", {"odd": Peer(lambda *_: "", build, "")})
    problem = layer_problem(SMALL, "uniform", torch.float32, CPU)
    contender = moe_bench.layer_contender("odd", problem)
    assert contender.absent == "cannot be set up: ImportError: libodd.so is missing"


@pytest.mark.slow
def test_compiled_and_eager_peers_agree() -> None:
    found = measure_moe(
        SMALL, "zipf", torch.float32, CPU, [], ["torch_eager", "torch_compiled"], repeats=1
    )
    assert all(row.error < 1e-5 for row in found if row.contender != "dense")


def test_the_truth_is_kept_for_a_choice_and_not_for_another() -> None:
    problem = layer_problem(SMALL, "uniform", torch.float32, CPU)
    layer = plain.eager_layer(problem)
    outputs, ids = layer.outputs(problem.x, problem.grad), layer.choose(problem.x)
    assert problem.error(ids, outputs) < 1e-5
    kept = problem.known
    assert problem.error(ids, outputs) < 1e-5
    assert problem.known is kept
    # Slots in another order: the same layer, another truth.
    assert problem.error(ids.flip(1), outputs) < 1e-5
    assert torch.equal(problem.known[0], ids.flip(1))


@pytest.mark.slow
def test_interpreted_our_products_are_those_of_fp64() -> None:
    program = str(SUPPORT / "interpreted_products.py")
    command = [sys.executable, program, "40,64,24,6,2", "zipf"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    error, misplaced = json.loads(result.stdout)
    assert error < 3e-3  # fp16
    assert misplaced > 0.5


@pytest.mark.slow
def test_a_first_call_is_timed_twice_in_processes_of_its_own() -> None:
    options = (str(SMALL), "uniform", "float32", "cpu")
    cold, warm = first_calls("moe", *options, "torch_eager")
    assert 0 < warm < 60 and 0 < cold < 60
    answer = first_calls("moe", *options, "sonicmoe")
    assert answer == "the first call failed (1): it runs on cuda, not on cpu"


@pytest.mark.slow
def test_a_first_call_with_full_caches_is_faster() -> None:
    cold, warm = first_calls("moe", str(SMALL), "uniform", "float32", "cpu", "torch_compiled")
    assert warm < cold


def test_a_first_call_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_kernels.bench.first_call.LIMIT_S", 0.05)
    answer = first_calls("router", "64,32,8,2", "uniform", "float32", "cpu", "reference")
    assert answer == "the first call took longer than 0 s"
