"""The router against the token-by-token oracle, and the rows that have broken others."""

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import KernelError, RouterConfig, route, z_loss

SWEEP = [
    (experts, top_k)
    for experts in (8, 16, 32, 64, 128, 256, 512)
    for top_k in (1, 2, 3, 4, 6, 8, 16)
    if top_k <= experts
]


def draw(tokens, width, experts):
    x, weight = torch.randn(tokens, width), torch.randn(experts, width) / width**0.5
    return x, weight, 0.1 * torch.randn(experts)


def against_oracle(x, weight, config, bias):
    """Routes, and checks ids, weights, scores and logits against the oracle."""
    got = route(x, weight, config, bias)
    wide_bias = None if bias is None else bias.double()
    none = torch.zeros(config.experts, 2, x.shape[1]).double()
    down = torch.zeros(config.experts, x.shape[1], 1).double()
    want = oracle.layer(x.double(), weight.double(), none, down, config, wide_bias)
    # fp32 cannot be held to a choice that scores closer than its rounding decide.
    clear = want.gaps > 1e-6
    assert clear.float().mean() > 0.6
    assert torch.equal(got.ids_TK[clear], want.choice[clear])
    torch.testing.assert_close(got.logits_TE.double(), want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.scores_TE.double(), want.scores, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        got.weights_TK[clear].double(), want.weights[clear], rtol=1e-5, atol=1e-7
    )
    assert got.ids_TK.dtype == torch.int64
    assert torch.equal(got.load_E, got.ids_TK.flatten().bincount(minlength=config.experts))
    return got


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k"), SWEEP)
def test_choice_and_weights_are_the_oracles(experts, top_k, score, biased):
    x, weight, bias = draw(5, 16, experts)
    config = RouterConfig(experts, top_k, score, renormalise=top_k % 2 == 0, scale=2.5)
    against_oracle(x, weight, config, bias if biased else None)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (8, 3), (2, 1), (16, 8)])
def test_choice_stays_in_the_best_groups(groups, top_groups, score):
    x, weight, bias = draw(24, 16, 32)
    config = RouterConfig(32, 4, score, groups=groups, top_groups=top_groups)
    against_oracle(x, weight, config, bias)


def test_bias_moves_the_choice_but_not_the_weights():
    x, weight, _ = draw(6, 16, 8)
    bias = torch.zeros(8)
    bias[5] = 10.0
    got = route(x, weight, RouterConfig(8, 2, "sigmoid", renormalise=False), bias)
    assert (got.ids_TK[:, 0] == 5).all()
    torch.testing.assert_close(got.weights_TK[:, 0], got.scores_TE[:, 5])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_lowest_index_wins_ties(score):
    logits = torch.tensor([[1.0, 2, 2, 2, 0, 2], [0, 0, 0, 0, 0, 0], [-0.0, 0, -0.0, 0, -0.0, 0]])
    got = route(logits, torch.eye(6), RouterConfig(6, 3, score))
    assert got.ids_TK.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]


def test_ties_between_groups_go_to_the_lowest():
    config = RouterConfig(8, 2, "sigmoid", groups=4, top_groups=1)
    assert route(torch.zeros(1, 8), torch.eye(8), config).ids_TK.tolist() == [[0, 1]]


def test_negative_biased_scores_are_ordered():
    bias = torch.tensor([-3.0, -1.0, -2.0, -4.0])
    got = route(torch.zeros(1, 4), torch.eye(4), RouterConfig(4, 4, "sigmoid"), bias)
    assert got.ids_TK.tolist() == [[1, 2, 0, 3]]


@pytest.mark.parametrize("groups", [1, 2])
def test_an_expert_whose_bias_is_not_a_number_comes_last(groups):
    bias = torch.tensor([0.0, float("nan"), -float("inf"), -5.0])
    config = RouterConfig(4, 4, "sigmoid", groups=groups, top_groups=groups)
    assert route(torch.zeros(1, 4), torch.eye(4), config, bias).ids_TK.tolist() == [[0, 3, 1, 2]]
    config = RouterConfig(4, 1, "softmax", groups=groups)
    assert route(torch.zeros(1, 4), torch.eye(4), config, bias).ids_TK.tolist() == [[0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_rows_that_are_not_finite_are_routed_and_counted(score, groups):
    x, _, bias = draw(8, 16, 16)
    weight = torch.eye(16)
    good = x.clone()
    x[1], x[3] = float("nan"), float("-inf")
    x[5, 2], x[7, 4] = float("inf"), float("nan")
    x.requires_grad_()
    weight.requires_grad_()
    config = RouterConfig(16, 4, score, groups=groups, top_groups=max(1, groups // 2))
    got = route(x, weight, config, bias)
    assert got.invalid.item() == 4
    assert got.valid_T.tolist() == [True, False] * 4
    assert all(len(set(row)) == 4 for row in got.ids_TK.tolist())
    assert got.ids_TK.min() >= 0
    assert got.ids_TK.max() < 16
    assert got.load_E.sum() == 32
    for value in (got.weights_TK, got.scores_TE, got.logits_TE):
        assert value.isfinite().all()
    rest = [0, 2, 4, 6]
    assert torch.equal(got.weights_TK[rest], route(good[rest], weight, config, bias).weights_TK)
    (got.weights_TK.square().sum() + z_loss(got.logits_TE)).backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert not x.grad[[1, 3, 5, 7]].any()


def test_weight_that_is_not_finite_makes_every_row_invalid():
    weight = torch.randn(8, 4)
    weight[3, 2] = float("nan")
    x = torch.randn(5, 4, requires_grad=True)
    got = route(x, weight, RouterConfig(8, 2, "softmax"))
    got.weights_TK.sum().backward()
    assert got.invalid == 5
    assert got.weights_TK.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_underflow_and_saturation_keep_ids_distinct_and_gradients_finite(score, renormalise):
    rows = torch.tensor([[0.0, -200, -200, -200], [-300.0] * 4, [300.0] * 4, [1e30, -1e30, 0, 1]])
    rows.requires_grad_()
    got = route(rows, torch.eye(4), RouterConfig(4, 3, score, renormalise=renormalise))
    assert all(len(set(row)) == 3 for row in got.ids_TK.tolist())
    assert got.weights_TK.isfinite().all()
    got.weights_TK.sum().backward()
    assert rows.grad.isfinite().all()
    assert got.invalid == 0


def test_gradients_of_scores_weights_and_logits_are_the_oracles():
    x, weight, bias = draw(7, 12, 8)
    config = RouterConfig(8, 3, "sigmoid", scale=1.7)
    grads = torch.randn(7, 3), torch.randn(7, 8), torch.randn(7, 8)

    def loss(weights, scores, logits):
        terms = zip(grads, (weights, scores, logits), strict=True)
        return sum((g.to(v.dtype) * v).sum() for g, v in terms)

    x32, w32 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    got = route(x32, w32, config, bias)
    loss(got.weights_TK, got.scores_TE, got.logits_TE).backward()
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    empty = torch.zeros(8, 2, 12).double(), torch.zeros(8, 12, 1).double()
    want = oracle.layer(x64, w64, *empty, config, bias.double())
    loss(want.weights, want.scores, want.logits).backward()
    assert oracle.relative_error(x32.grad, x64.grad) < 1e-5
    assert oracle.relative_error(w32.grad, w64.grad) < 1e-5


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck_in_fp64(score):
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)

    def weights_and_logits(x, weight):
        got = route(x, weight, RouterConfig(8, 3, score))
        return got.weights_TK, got.logits_TE

    assert torch.autograd.gradcheck(weights_and_logits, (x, weight))


def test_a_replay_gives_the_same_answer_for_any_strides():
    x, weight, bias = draw(64, 16, 32)
    config = RouterConfig(32, 6, "sigmoid")
    first = route(x, weight, config, bias)
    again = route(x.t().contiguous().t(), weight.t().contiguous().t(), config, bias)
    assert torch.equal(first.ids_TK, again.ids_TK)
    sliced = route(x.repeat(1, 2)[:, :16], weight, config, bias.repeat(2)[:32])
    assert torch.equal(first.ids_TK, sliced.ids_TK)
    torch.testing.assert_close(first.weights_TK, sliced.weights_TK)


def test_no_tokens():
    weight = torch.randn(8, 4, requires_grad=True)
    got = route(torch.empty(0, 4), weight, RouterConfig(8, 2, "softmax", groups=2))
    assert got.ids_TK.shape == got.weights_TK.shape == (0, 2)
    assert got.load_E.tolist() == [0] * 8
    (got.weights_TK.sum() + z_loss(got.logits_TE)).backward()
    assert not weight.grad.any()


def test_logits_are_fp32_under_autocast_and_for_bf16_tokens():
    x, weight, bias = draw(16, 32, 8)
    x = x.bfloat16()
    config = RouterConfig(8, 2, "sigmoid")
    want = route(x.float(), weight, config, bias).logits_TE
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = route(x, weight, config, bias)
    assert torch.equal(got.logits_TE, want)
    assert got.weights_TK.dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("experts", {"experts": 0}),
        ("top_k", {"top_k": 9}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": 5, "groups": 2, "top_groups": 1}),
        ("score", {"score": "tanh"}),
        ("groups", {"groups": 3}),
        ("groups", {"groups": 0}),
        ("top_groups", {"groups": 2, "top_groups": 3}),
        ("scale", {"scale": 0.0}),
        ("scale", {"scale": float("nan")}),
        ("capacity_factor", {"capacity_factor": -1.0}),
        ("overflow", {"overflow": "spill"}),
    ],
)
def test_a_bad_setting_is_named(field, change):
    with pytest.raises(KernelError, match=rf"E-ROUTER-CONFIG: router\.{field} is") as caught:
        RouterConfig(**({"experts": 8, "top_k": 2, "score": "softmax"} | change))
    assert caught.value.code == "E-ROUTER-CONFIG"


@pytest.mark.parametrize(
    ("name", "x", "weight", "bias"),
    [
        ("x", (2, 3, 4), (8, 4), (8,)),
        ("weight", (3, 4), (8, 5), (8,)),
        ("weight", (3, 4), (7, 4), (8,)),
        ("bias", (3, 4), (8, 4), (4,)),
    ],
)
def test_a_shape_that_does_not_fit_is_named(name, x, weight, bias):
    with pytest.raises(KernelError, match=rf"E-ROUTER-SHAPE: router {name} has shape"):
        route(torch.ones(x), torch.ones(weight), RouterConfig(8, 2, "softmax"), torch.ones(bias))
