"""Losses, bias update, capacity and load measures against hand counts and plain queues."""

import math

import moe_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_kernels import (
    KernelError,
    RouterConfig,
    apply_capacity,
    load_balance_loss,
    load_stats,
    route,
    sequence_balance_loss,
    update_bias,
    z_loss,
)


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), math.log(5)]])
    want = (math.log(2) ** 2 + math.log(8) ** 2) / 2
    assert z_loss(logits).item() == pytest.approx(want, rel=1e-6)


def test_sequence_balance_loss_by_hand():
    # Sequence 1: 3 tokens choose experts 0, 0, 1; f = (3/3) * (2, 1, 0), P = (.5, .3, .2).
    # Sequence 2: all choose expert 2; f = (0, 0, 3), P = (.1, .2, .7).
    first = [[0.5, 0.3, 0.2]] * 3
    second = [[0.2, 0.4, 1.4]] * 3  # sums to 2: normalised over experts before the mean
    scores = torch.tensor(first + second)
    ids = torch.tensor([[0], [0], [1], [2], [2], [2]])
    want = ((2 * 0.5 + 1 * 0.3) + 3 * 0.7) / 2
    assert sequence_balance_loss(scores, ids, 2).item() == pytest.approx(want, rel=1e-6)


def test_balance_losses_are_one_when_even():
    scores = torch.full((8, 4), 0.25)
    ids = torch.tensor([[0, 1], [2, 3]] * 4)
    assert sequence_balance_loss(scores, ids, 2).item() == pytest.approx(1.0)
    assert load_balance_loss(scores, torch.full((4,), 4)).item() == pytest.approx(1.0)


def test_load_balance_loss_by_hand():
    scores = torch.tensor([[0.7, 0.3], [0.9, 0.1]])
    assert load_balance_loss(scores, torch.tensor([3, 1])).item() == pytest.approx(
        2 * (0.75 * 0.8 + 0.25 * 0.2)
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", ["sequence", "load"])
def test_balance_gradient_reaches_the_router(loss, score):
    x, weight = torch.randn(12, 16), torch.randn(8, 16, requires_grad=True)
    got = route(x, weight, RouterConfig(8, 2, score))
    if loss == "sequence":
        sequence_balance_loss(got.scores_TE, got.ids_TK, 3).backward()
    else:
        load_balance_loss(got.scores_TE, got.load_E).backward()

    wide = weight.detach().double().requires_grad_()
    logits = x.double() @ wide.t()
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    rows, length = (3, 4) if loss == "sequence" else (1, 12)
    terms = []
    for start in range(0, 12, length):
        chosen = got.ids_TK[start : start + length].flatten().tolist()
        share = scores[start : start + length]
        share = share / share.sum(-1, keepdim=True)
        terms += [8 / (2 * length) * chosen.count(e) * share[:, e].mean() for e in range(8)]
    (sum(terms) / rows).backward()
    assert wide.grad.norm() > 1e-3
    assert oracle.relative_error(weight.grad, wide.grad) < 1e-5


def test_balance_losses_do_not_depend_on_how_a_batch_is_cut():
    x, weight = torch.randn(24, 16), torch.randn(8, 16)
    config = RouterConfig(8, 2, "sigmoid")
    whole, halves = route(x, weight, config), [route(part, weight, config) for part in x.chunk(2)]
    by_sequence = [sequence_balance_loss(h.scores_TE, h.ids_TK, 2) for h in halves]
    want = sequence_balance_loss(whole.scores_TE, whole.ids_TK, 4)
    torch.testing.assert_close(sum(by_sequence) / 2, want)
    by_load = [load_balance_loss(h.scores_TE, whole.load_E) for h in halves]
    torch.testing.assert_close(sum(by_load) / 2, load_balance_loss(whole.scores_TE, whole.load_E))


def test_losses_of_no_tokens_are_zero():
    scores, ids = torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64)
    assert sequence_balance_loss(scores, ids, 1) == 0
    assert load_balance_loss(scores, torch.zeros(4, dtype=torch.int64)) == 0
    assert z_loss(scores) == 0


@pytest.mark.parametrize("rows", [0, 5])
def test_rows_that_do_not_divide_the_tokens_are_an_error(rows):
    with pytest.raises(KernelError, match=r"E-BALANCE-ROWS: 12 tokens"):
        sequence_balance_loss(torch.ones(12, 4), torch.zeros(12, 1, dtype=torch.int64), rows)


def test_bias_rises_for_the_idle_and_falls_for_the_busy():
    bias = torch.tensor([1.0, 1.0, 1.0, 1.0])
    same = bias
    update_bias(bias, torch.tensor([2, 7, 4, 3]), 0.25)
    assert bias.tolist() == [1.25, 0.75, 1.0, 1.25]
    update_bias(bias, torch.tensor([2, 7, 4, 3]), 0.25)
    assert bias.tolist() == [1.5, 0.5, 1.0, 1.5]
    assert same is bias


def test_bias_stays_when_loads_are_equal_though_their_mean_is_inexact():
    bias = torch.zeros(3)
    update_bias(bias, torch.tensor([33333333] * 3), 0.1)
    update_bias(bias, torch.zeros(3, dtype=torch.int64), 0.1)
    assert not bias.any()


def test_bias_update_brings_the_load_to_balance():
    x, weight, bias = torch.randn(512, 16) + 0.5, torch.randn(8, 16), torch.zeros(8)
    config = RouterConfig(8, 2, "sigmoid")
    before = load_stats(route(x, weight, config, bias).load_E)["imbalance"]
    for _ in range(150):
        update_bias(bias, route(x, weight, config, bias).load_E, 5e-3)
    assert before > 1.5
    assert load_stats(route(x, weight, config, bias).load_E)["imbalance"] < 1.1


def test_a_bias_in_bf16_is_refused():
    with pytest.raises(KernelError, match="E-BIAS-DTYPE"):
        update_bias(torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64), 1e-3)


def test_load_stats_by_hand():
    stats = load_stats(torch.tensor([[6, 2, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(stats["imbalance"], torch.tensor([3.0, 1.0, 0.0]))
    torch.testing.assert_close(stats["entropy"], torch.tensor([entropy, math.log(4), 0.0]))
    assert stats["dead_experts"].tolist() == [2, 0, 4]


def limited(x, weight, overflow, factor, bias=None, **settings):
    config = RouterConfig(
        weight.shape[0], 3, "sigmoid", capacity_factor=factor, overflow=overflow, **settings
    )
    free = RouterConfig(weight.shape[0], 3, "sigmoid", **settings)
    capacity = math.ceil(factor * x.shape[0] * 3 / weight.shape[0])
    return config, route(x, weight, config, bias), route(x, weight, free, bias), capacity


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
def test_drop_is_a_queue_per_expert(factor):
    x, weight, bias = torch.randn(40, 8) + 0.5, torch.randn(8, 8), torch.randn(8) / 10
    _, got, free, capacity = limited(x, weight, "drop", factor, bias)
    want, _ = oracle.within_capacity(free.ids_TK, 8, capacity)
    assert got.ids_TK.tolist() == want
    kept = got.ids_TK < 8
    assert got.dropped == (~kept).sum()
    assert torch.equal(got.weights_TK[kept], free.weights_TK[kept])
    assert not got.weights_TK[~kept].any()
    assert torch.equal(got.load_E, free.load_E)
    assert (factor == 8.0) == (got.dropped == 0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("groups", [1, 4])
def test_reroute_goes_to_the_next_best_with_room(factor, groups):
    x, weight, bias = torch.randn(40, 8) + 0.5, torch.randn(8, 8), torch.randn(8) / 10
    top_groups = {"groups": groups, "top_groups": max(1, groups // 2)}
    _, got, free, capacity = limited(x, weight, "reroute", factor, bias, **top_groups)
    everything = RouterConfig(8, 8 // groups * top_groups["top_groups"], "sigmoid", **top_groups)
    ranked = route(x, weight, everything, bias).ids_TK.tolist()
    want = oracle.rerouted(free.ids_TK, ranked, 8, capacity)
    assert got.ids_TK.tolist() == want
    kept = got.ids_TK < 8
    assert got.dropped == (~kept).sum()
    full = kept.all(-1)
    scores = got.scores_TE.gather(1, got.ids_TK.clamp_max(7))
    torch.testing.assert_close(
        got.weights_TK[full], (scores / scores.sum(-1, keepdim=True))[full], rtol=1e-5, atol=1e-7
    )
    assert not got.weights_TK[~kept].any()


def test_reroute_with_room_for_all_drops_nothing():
    x, weight = torch.randn(40, 8) + 2.0, torch.randn(8, 8)
    _, got, free, _ = limited(x, weight, "reroute", 1.5)
    assert (free.load_E > 23).any()
    assert got.dropped == 0
    assert not torch.equal(got.ids_TK, free.ids_TK)


def test_dropping_lets_no_later_token_change_an_earlier_one():
    x, weight = torch.randn(40, 8), torch.randn(8, 8)
    changed = x.clone()
    changed[25:] = torch.randn(15, 8)
    before, after = (limited(v, weight, "drop", 0.75)[1] for v in (x, changed))
    assert torch.equal(before.ids_TK[:25], after.ids_TK[:25])
    assert torch.equal(before.weights_TK[:25], after.weights_TK[:25])
    assert before.dropped > 0


def test_a_dropped_assignment_counts_for_no_expert_in_the_balance_loss():
    scores = torch.full((2, 2), 0.5)
    assert sequence_balance_loss(scores, torch.tensor([[0], [2]]), 1).item() == pytest.approx(0.5)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    factor=st.floats(0.1, 3.0),
    overflow=st.sampled_from(["drop", "reroute"]),
    seed=st.integers(0, 1000),
)
def test_capacity_holds_for_any_load(tokens, experts, top_k, factor, overflow, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=draw)
    weight = torch.randn(experts, 3, generator=draw)
    top_k = min(top_k, experts)
    config = RouterConfig(experts, top_k, "softmax", capacity_factor=factor, overflow=overflow)
    got = route(x, weight, config)
    load = got.ids_TK.flatten().bincount(minlength=experts + 1)
    assert (load[:experts] <= math.ceil(factor * tokens * top_k / experts)).all()
    assert load[experts] == got.dropped
    for row in got.ids_TK.tolist():
        real = [e for e in row if e < experts]
        assert len(set(real)) == len(real)


def test_without_a_limit_the_routing_is_returned_as_it_is():
    config = RouterConfig(4, 2, "softmax")
    routing = route(torch.randn(3, 4), torch.randn(4, 4), config)
    assert apply_capacity(routing, config) is routing
