"""The group as an object: its settings, its sizes, what it refuses; a group of one rank."""

import math
from fractions import Fraction

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import KernelError, MoE, RouterConfig, moe
from nmoe_kernels.rdep import ExpertParallel, Settings, expert_parallel_moe
from nmoe_kernels.rdep.counters import Tally
from rdep_inputs import INNER, WIDTH, as_routing, make_problem


def alone(experts=8, slots=3, dtype=torch.float32, tokens_max=64, **settings):
    return ExpertParallel(
        None,
        experts=experts,
        width=WIDTH,
        slots=slots,
        tokens_max=tokens_max,
        dtype=dtype,
        device="cpu",
        settings=Settings(**settings),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "pigeon"),
        ("capacity", 0.0),
        ("capacity", float("nan")),
        ("capacity", "roomy"),
        ("capacity", True),
        ("overflow", "ignore"),
        ("deadline_s", 0),
        ("deadline_s", float("inf")),
        ("keep", "sometimes"),
    ],
)
def test_settings_name_the_field_that_is_wrong(field, value):
    with pytest.raises(KernelError, match=f"rdep.{field} is ") as error:
        Settings(**{field: value})
    assert error.value.code == "E-RDEP-SETTINGS"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sizes",
    [{"experts": 0}, {"slots": 0}, {"slots": 9}, {"tokens_max": 0}, {"tokens_max": 2**31 // 3 + 1}],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(KernelError) as error:
        alone(**sizes)
    assert error.value.code == "E-RDEP-SHAPE"


@pytest.mark.parametrize("transport", ["collective", "p2p", "nvshmem"])
def test_a_transport_between_ranks_needs_a_process_group(transport):
    with pytest.raises(KernelError, match="it needs a process group, and there is none") as error:
        alone(transport=transport)
    assert error.value.code == "E-RDEP-TRANSPORT"


def test_a_group_of_one_owns_all_experts_and_moves_nothing():
    with alone() as group:
        assert (group.rank, group.ranks, group.experts_local) == (0, 1, 8)
        assert group.local_experts == range(8)
        assert group.transport == "local"
        problem = make_problem([20], 8, 3, "zipf", torch.float32, dropped=0.2)
        routing = as_routing(problem.ids, problem.weights, 8)
        args = (problem.x, routing, problem.gate_up, problem.down)
        assert torch.equal(expert_parallel_moe(*args, group), moe(*args))
        counters = group.counters()
    assert counters.rows_sent_R.tolist() == counters.bytes_sent_R.tolist() == [0]
    assert int(counters.dropped) == int((problem.ids == 8).sum())


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("x", torch.randn(5, WIDTH + 1)),
        ("x", torch.randn(5, WIDTH, dtype=torch.bfloat16)),
        ("x", torch.randn(1, 5, WIDTH)),
        ("ids", torch.zeros(5, 2, dtype=torch.int64)),
        ("weights", torch.zeros(4, 3)),
        ("gate_up", torch.randn(4, 2 * INNER, WIDTH)),
        ("down", torch.randn(8, WIDTH, INNER + 1)),
    ],
)
def test_a_layer_that_does_not_fit_its_group_is_refused(part, wrong):
    problem = make_problem([5], 8, 3, "uniform", torch.float32)
    setattr(problem, part, wrong)
    routing = as_routing(problem.ids, problem.weights, 8)
    with alone() as group, pytest.raises(KernelError) as error:
        expert_parallel_moe(problem.x, routing, problem.gate_up, problem.down, group)
    assert error.value.code == "E-RDEP-SHAPE"
    assert "\n" not in str(error.value)


def test_more_tokens_than_the_group_was_made_for_are_refused():
    problem = make_problem([65], 8, 3, "uniform", torch.float32)
    routing = as_routing(problem.ids, problem.weights, 8)
    with alone() as group, pytest.raises(KernelError, match="at most 64, 16") as error:
        expert_parallel_moe(problem.x, routing, problem.gate_up, problem.down, group)
    assert error.value.code == "E-RDEP-SHAPE"


@pytest.mark.parametrize("capacity", [0.1, 0.3, 0.5, 1.0, 1.1, 8.0])
@pytest.mark.parametrize("tokens", [1, 24, 39, 49, 64])
def test_an_expert_takes_exactly_its_capacity(capacity, tokens):
    """ceil(capacity * T_max * K / E) by exact arithmetic, however many tokens come. With these
    sizes the quotient of the bound by T * K / E, multiplied by it again, may exceed the bound."""
    bound = math.ceil(Fraction(str(capacity)) * 64 * 5 / 6)
    ids = torch.tensor([[5, 0, 1, 4, 2]]).expand(tokens, 5)
    routing = as_routing(ids, torch.ones(tokens, 5) / 5, 6)
    config = RouterConfig(6, 5, "sigmoid")
    with alone(6, 5, capacity=capacity, overflow="drop") as group:
        limited = group.limit(routing, config).ids_TK
        assert torch.equal(group.within_capacity(ids, count=True), limited)
        counters = group.counters()
    kept = min(bound, tokens)
    want = torch.where(torch.arange(tokens)[:, None] < kept, ids, 6)
    assert torch.equal(limited, want)
    assert int(counters.overflow) == 5 * (tokens - kept)


def test_a_module_in_a_group_is_the_module_alone():
    config = RouterConfig(8, 3, "sigmoid")
    x = torch.randn(2, 9, WIDTH)
    with alone() as group:
        layer = MoE(WIDTH, INNER, config, expert_parallel=group)
        layer.reset_parameters(torch.Generator().manual_seed(1))
        plain = MoE(WIDTH, INNER, config)
        plain.load_state_dict(layer.state_dict())
        y, routing = layer(x)
        assert torch.equal(y, plain(x)[0])
        assert routing.ids_TK.shape == (18, 3)


def test_double_precision_stays_double():
    problem = make_problem([6], 4, 2, "uniform", torch.float64)
    weights = torch.rand(6, 2, dtype=torch.float64)
    routing = as_routing(problem.ids, weights, 4)
    with alone(experts=4, slots=2, dtype=torch.float64) as group:
        y = expert_parallel_moe(
            problem.x, routing, problem.gate_up, problem.down, group, backend="reference"
        )
    for token in range(6):
        want = sum(
            w * oracle.expert(problem.x[token], problem.gate_up[e], problem.down[e])
            for e, w in zip(problem.ids[token], weights[token], strict=True)
        )
        assert oracle.relative_error(y[token], want) < 1e-13


def test_a_compiler_may_work_around_the_layer():
    torch.compiler.reset()
    config = RouterConfig(8, 3, "sigmoid")
    with alone() as group:
        layer = MoE(WIDTH, INNER, config, expert_parallel=group)
        layer.reset_parameters(torch.Generator().manual_seed(1))

        def block(x):
            return torch.nn.functional.silu(layer(torch.sin(x))[0]) * 2

        x = torch.randn(10, WIDTH, requires_grad=True)
        grad = torch.randn(10, WIDTH)
        parts = (x, layer.gate_up, layer.router.weight)
        want = torch.autograd.grad((block(x) * grad).sum(), parts)
        graphs = []

        def watch(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        compiled = torch.compile(block, backend=watch)
        got = torch.autograd.grad((compiled(x) * grad).sum(), parts)
        for one, other in zip(got, want, strict=True):
            assert oracle.relative_error(one, other) < 1e-6
    # What is around the layer was compiled; the exchange, which waits for peers, was not.
    assert any("silu" in code for code in graphs)
    assert not any("searchsorted" in code for code in graphs)


def test_a_closed_group_says_so_and_closes_twice():
    group = alone()
    group.close()
    group.close()
    with pytest.raises(KernelError) as error:
        group.check()
    assert error.value.code == "E-RDEP-CLOSED"


def test_counters_tell_what_came_since():
    tally = Tally(1, 3, torch.device("cpu"))
    waits = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
    tally.sent(torch.tensor([2, 7, 1]), 10)
    before = tally.snapshot(waits)
    tally.sent(torch.tensor([1, 1, 1]), 100)
    with tally.stage("expert"):
        sum(range(1000))
    since = tally.snapshot(3 * waits).since(before)
    assert before.rows_sent_R.tolist() == [2, 0, 1]
    assert since.rows_sent_R.tolist() == [1, 0, 1]
    assert since.bytes_sent_R.tolist() == [100, 0, 100]
    assert since.exchanges == 1
    assert since.wait_s_R.tolist() == [1.0, 0.0, 0.5]
    assert since.stage_ms["expert"] > 0
    assert since.stage_ms["combine"] == 0
