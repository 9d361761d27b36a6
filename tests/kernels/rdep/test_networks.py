"""MoE layers over ranks inside a network: shapes, accumulation, replay, capacity, odd inputs."""

import dataclasses
import math

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import MoE, RouterConfig, route
from nmoe_kernels.router.reference import choice_scores
from rdep_cases import network_batch, whole_network
from rdep_inputs import INNER, WIDTH
from rdep_ranks import Group, run_groups

BATCHES = [[7, 0, 33, 12], [64, 5, 1, 8]]
TOKENS = [40, 1, 0, 23]
NETWORKS = {
    f"{keep}{', replayed' if replay else ''}": {"batches": BATCHES, "keep": keep, "replay": replay}
    for keep in ("keep", "fetch")
    for replay in (False, True)
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    groups = {name: Group("network", 4, settings) for name, settings in NETWORKS.items()}
    for overflow in ("error", "drop", "reroute"):
        groups[overflow] = Group("capacity", 4, {"tokens": TOKENS, "overflow": overflow})
    groups["odd"] = Group("odd_inputs", 2)
    groups["memory"] = Group("fetched_memory", 2)
    return run_groups(tmp_path_factory.mktemp("networks"), groups)


@pytest.fixture(scope="module")
def single():
    """The same network on one rank: outputs, gradients of x, gradients of parameters."""
    network, outputs, inputs = whole_network(), [], []
    for number, tokens in enumerate(BATCHES):
        x, grad = network_batch(tokens, number)
        x.requires_grad_()
        y = network(x)
        y.backward(grad)
        outputs.append(y.detach())
        inputs.append(x.grad)
    grads = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {"y": outputs, "x": inputs, "grads": grads}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_several_shapes_learns_as_on_one_rank(answers, single, name):
    """Two accumulated batches. fp32 through three layers, routers included: 2e-5."""
    ranked = answers[name]
    for part in ("y", "x"):
        for number, want in enumerate(single[part]):
            got = torch.cat([answer[part][number] for answer in ranked])
            assert oracle.relative_error(got, want) < 2e-5
    for parameter, want in single["grads"].items():
        grads = [answer["grads"][parameter] for answer in ranked]
        whole = sum(grads) if grads[0].shape == want.shape else torch.cat(grads)
        assert want.norm() > 1e-3, parameter
        assert oracle.relative_error(whole, want) < 2e-5, parameter


def test_ways_to_keep_rows_give_the_same_bits(answers):
    for name in NETWORKS:
        for got, want in zip(answers[name], answers["keep"], strict=True):
            for parameter, grad in want["grads"].items():
                assert torch.equal(got["grads"][parameter], grad), (name, parameter)


def test_fetching_gives_up_the_memory_of_the_rows_in_between(answers):
    for sizes in answers["memory"]:
        after_forward, after_backward, size = sizes["fetch"]
        assert after_forward == 0
        assert after_backward == size > 0
        assert sizes["keep"] == (size, size, size)


def test_replays_are_not_counted_again(answers):
    """Fault 4: a layer under checkpointing runs its forward twice, and drops once."""
    for answer in answers["drop"]:
        once, replays = answer["counters"], answer["replays"]
        assert replays.exchanges > 2 * once.exchanges
        assert torch.equal(replays.dropped, once.dropped)
    assert sum(int(answer["counters"].dropped) for answer in answers["drop"]) > 10


def routed(tokens):
    """Each rank's routing without a capacity, the scores in order, and the capacity."""
    x = torch.randn(sum(tokens), WIDTH, generator=torch.Generator().manual_seed(9))
    whole = MoE(WIDTH, INNER, RouterConfig(8, 3, "sigmoid"))
    whole.reset_parameters(torch.Generator().manual_seed(3))
    limit = math.ceil(0.5 * max(tokens) * 3 / 8)
    for share in x.split(tokens):
        routing = route(share, whole.router.weight, whole.router.config)
        scores = choice_scores(routing.scores_TE, whole.router.config, None)
        yield share, whole, routing, scores.argsort(descending=True, stable=True), limit


def sum_of_experts(whole, x_t, ids, weights):
    """One token's output through its experts that were not dropped, in fp64."""
    y = torch.zeros_like(x_t)
    for e, weight in zip(ids, weights.double(), strict=True):
        if e < 8:
            y += weight * oracle.expert(x_t, whole.gate_up[e].double(), whole.down[e].double())
    return y


@torch.no_grad()
@pytest.mark.parametrize("overflow", ["error", "drop", "reroute"])
def test_a_full_expert_refuses_what_one_source_brings_beyond_its_capacity(answers, overflow):
    """Against a plain queue per source; the bound comes from T_max, not from the rank's own T."""
    beyond_all = 0
    for answer, (x, whole, routing, ranked, limit) in zip(
        answers[overflow], routed(TOKENS), strict=True
    ):
        kept, _ = oracle.within_capacity(routing.ids_TK, 8, limit)
        if overflow == "reroute" and len(x):
            kept = oracle.rerouted(routing.ids_TK, ranked.tolist(), 8, limit)
        ids = torch.tensor(kept, dtype=torch.int64).reshape(-1, 3)
        beyond = int((ids == 8).sum())
        beyond_all += beyond
        if overflow != "error":
            assert torch.equal(answer["routing"].ids_TK, ids)
            assert int(answer["routing"].dropped) == beyond
        assert int(answer["counters"].dropped) == beyond
        weights = answer["routing"].weights_TK.detach()
        for token, got in enumerate(answer["y"]):
            want = sum_of_experts(whole, x[token].double(), ids[token].tolist(), weights[token])
            assert (got - want).norm() < 5e-6 * want.norm().clamp_min(1.0)
    assert beyond_all > (10 if overflow != "reroute" else -1)


def test_overflow_is_an_error_by_default_said_once(answers):
    for answer, (_, _, routing, _, limit) in zip(answers["error"], routed(TOKENS), strict=True):
        beyond = int((torch.tensor(oracle.within_capacity(routing.ids_TK, 8, limit)[0]) == 8).sum())
        first, second = answer["refusals"]
        assert second is None
        assert int(answer["counters"].overflow) == beyond
        if not beyond:
            assert first is None
            continue
        assert first.code == "E-RDEP-CAPACITY"
        assert f"{beyond} assignments" in first.message
    for name in ("drop", "reroute"):
        assert all(answer["refusals"] == [None, None] for answer in answers[name])


def test_a_bad_row_gives_zero_and_takes_no_gradient(answers):
    for rank, answer in enumerate(answers["odd"]):
        y, grad_x, grad_experts, grad_router = answer["bad row"]
        assert all(part.isfinite().all() for part in (y, grad_x, grad_experts, grad_router))
        assert bool(y[2].any()) == (rank != 0)
        assert bool(grad_x[2].any()) == (rank != 0)


def test_inference_frozen_inputs_and_autocast(answers):
    for answer in answers["odd"]:
        assert answer["no grad"]
        assert answer["frozen input"]
        assert answer["autocast"]


def test_counters_count_what_one_call_moved(answers):
    first, second = (answer["since"] for answer in answers["odd"])
    # Forward out and back, gradient of y out, and that of x and the weights back.
    assert first.exchanges == second.exchanges == 4
    # What rank 0 sends to rank 1 out, rank 1 sends to rank 0 back: the same number of rows.
    assert first.rows_sent_R[0] == second.rows_sent_R[1] == 0
    assert first.rows_sent_R[1] == second.rows_sent_R[0] > 0
    values, slots = 4 * WIDTH, 2
    rows_out = [answer.rows_sent_R.sum() for answer in (first, second)]
    assert rows_out[0] % 2 == 0
    # Out: rows with ids and weights, and rows; back: rows, and rows with gradients of weights.
    total = sum(int(answer.bytes_sent_R.sum()) for answer in (first, second))
    assert total == int(sum(rows_out)) * values + int(sum(rows_out)) // 4 * slots * (4 + 4 + 4)
    assert set(first.stage_ms) == {"dispatch", "expert", "combine"}
    assert all(ms > 0 for ms in first.stage_ms.values())
    assert first.wait_s_R[0] == 0
    assert first.wait_s_R[1] > 0
    assert dataclasses.fields(first)


def test_ranks_that_would_write_past_each_others_memory_are_refused(answers):
    for answer in answers["odd"]:
        assert answer["sizes"] == [None, "its ranks were opened with different sizes"]


def test_transports_that_cannot_run_say_why(answers):
    for answer in answers["odd"]:
        assert answer["p2p"].code == answer["local"].code == "E-RDEP-TRANSPORT"
        assert "it runs on cuda, not on cpu" in answer["p2p"].message
        assert "it is for one rank, and there are 2" in answer["local"].message
        assert "\n" not in answer["p2p"].message + answer["local"].message
        assert answer["closed"].code == "E-RDEP-CLOSED"
