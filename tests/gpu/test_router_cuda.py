"""The fused router on CUDA against fp64, and the rows and inputs that have broken others.

The truth is written here again, for all tokens at once and in fp64; ids are compared where the
scores that decide them are further apart than rounding.

Letters: T tokens, H width, E experts, K experts per token, G groups of experts.
"""

from dataclasses import dataclass

import pytest
import torch
from moe_oracle import relative_error
from nmoe_kernels import (
    RouterConfig,
    apply_capacity,
    load_balance_loss,
    load_stats,
    route,
    sequence_balance_loss,
    z_loss,
)
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("seeded"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The weight goes in as 16 of its 24 bits; sums are fp32 over the width.
TOLERANCE = 1e-4
# A gradient of x is rounded to bf16.
BF16 = 5e-3
GAP = 1e-4

PAIRS = [
    (8, 1),
    (8, 8),
    (16, 4),
    (32, 6),
    (60, 4),
    (64, 2),
    (64, 8),
    (128, 8),
    (160, 6),
    (256, 8),
    (256, 16),
    (384, 3),
    (512, 10),
    (512, 32),
]


@dataclass
class Truth:
    """The routing in fp64; `clear` marks tokens whose choice is beyond rounding."""

    ids: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor
    clear: torch.Tensor


def draw(tokens, width, experts):
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = torch.randn(experts, width, device="cuda") * width**-0.5
    return x, weight, 0.1 * torch.randn(experts, device="cuda")


def truth_of(x, weight, config, bias=None):
    logits = x.double() @ weight.double().t()
    scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.double()
    # Scores of a softmax over many experts are small; the gap is measured in the same unit.
    unit = scores.detach().amax(-1)
    clear = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if config.top_groups < config.groups:
        groups = choice.unflatten(-1, (config.groups, -1))
        count = min(2 if config.score == "sigmoid" else 1, groups.shape[-1])
        worth = groups.topk(count, dim=-1).values.sum(-1)
        ranked = worth.sort(dim=-1, descending=True, stable=True)
        best, left = (ranked.values[:, config.top_groups - n] for n in (1, 0))
        clear &= best - left > GAP * unit
        open_groups = torch.zeros_like(worth, dtype=torch.bool)
        open_groups.scatter_(-1, ranked.indices[:, : config.top_groups], True)
        choice = groups.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    ranked = choice.sort(dim=-1, descending=True, stable=True)
    decided = ranked.values[:, : config.top_k + 1]
    decided = decided.nan_to_num(neginf=-1e9)
    clear &= (decided[:, :-1] - decided[:, 1:] > GAP * unit[:, None]).all(-1)
    return Truth(ranked.indices[:, : config.top_k], logits, scores, clear)


def weights_of(scores, ids, config):
    chosen = scores.gather(-1, ids)
    if config.renormalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * config.scale


def check(x, weight, config, bias=None):
    """Ids, weights, logits, load and all gradients against fp64."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    got = route(x, weight, config, bias, backend="triton")
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    want = truth_of(*wide, config, bias)
    assert want.clear.float().mean() > 0.25
    assert torch.equal(got.ids_TK[want.clear], want.ids[want.clear])
    ordered = got.ids_TK.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert torch.equal(got.load_E, got.ids_TK.flatten().bincount(minlength=config.experts))
    assert got.invalid == 0 and got.valid_T.all()
    weights = weights_of(want.scores, got.ids_TK, config)
    for one, other in (
        (got.logits_TE, want.logits),
        (got.scores_TE, want.scores),
        (got.weights_TK, weights),
    ):
        assert one.dtype == torch.float32
        assert relative_error(one, other) < TOLERANCE

    upstream = [torch.randn(t.shape, device="cuda") for t in (got.weights_TK, got.logits_TE)]
    for chosen in ((0,), (1,), (0, 1)):
        grads = [upstream[n] for n in chosen]
        ours = [(got.weights_TK, got.logits_TE)[n] for n in chosen]
        theirs = [(weights, want.logits)[n] for n in chosen]
        found = torch.autograd.grad(ours, (x, weight), grads, retain_graph=True)
        true = torch.autograd.grad(
            theirs, wide, [grad.double() for grad in grads], retain_graph=True
        )
        if config.renormalise and config.top_k == 1 and chosen == (0,):
            # The weight is the constant `scale`: its gradient is 0 but for rounding.
            assert found[1].abs().max() < 1e-4 * upstream[0].abs().sum()
            continue
        assert relative_error(found[0], true[0]) < BF16
        assert relative_error(found[1], true[1]) < TOLERANCE


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_every_number_of_experts_and_slots(score, biased, poisoned_memory):
    for experts, top_k in PAIRS:
        x, weight, bias = draw(300, 512, experts)
        config = RouterConfig(experts, top_k, score, renormalise=top_k % 2 == 0, scale=2.5)
        check(x, weight, config, bias if biased else None)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups"), [(64, 8, 3), (256, 8, 4), (60, 5, 2), (32, 16, 8)]
)
def test_choice_stays_in_the_best_groups(experts, groups, top_groups, score, poisoned_memory):
    x, weight, bias = draw(1000, 256, experts)
    config = RouterConfig(experts, 4, score, groups=groups, top_groups=top_groups)
    check(x, weight, config, bias)


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "top_k"),
    [
        (1, 2048, 64, 4),
        (17, 72, 16, 2),
        (127, 1000, 64, 4),
        (4096, 2048, 64, 4),
        (8192, 7168, 64, 8),
        (8193, 512, 128, 8),
        (32768, 4096, 128, 8),
        (131072, 1536, 128, 8),
    ],
)
def test_at_real_sizes_it_is_fp64(tokens, width, experts, top_k, poisoned_memory):
    x, weight, bias = draw(tokens, width, experts)
    check(x, weight, RouterConfig(experts, top_k, "sigmoid"), bias)


def test_a_width_that_is_not_aligned():
    for width in (10, 33, 500, 1023):
        x, weight, bias = draw(257, width, 8)
        check(x, weight, RouterConfig(8, 2, "softmax"), bias)


def test_no_tokens():
    x, weight = torch.empty(0, 64, device="cuda").bfloat16(), torch.randn(8, 64, device="cuda")
    x.requires_grad_()
    weight.requires_grad_()
    got = route(x, weight, RouterConfig(8, 2, "softmax", groups=2), backend="triton")
    assert got.ids_TK.shape == got.weights_TK.shape == (0, 2)
    assert got.load_E.tolist() == [0] * 8
    (got.weights_TK.sum() + z_loss(got.logits_TE)).backward()
    assert not weight.grad.any()
    assert x.grad.shape == (0, 64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_rows_that_are_not_finite_are_routed_and_counted(score, groups, poisoned_memory):
    x, weight, bias = draw(256, 128, 16)
    good = x.clone()
    x[1], x[3], x[5] = float("nan"), float("-inf"), float("inf")
    x[7, 2], x[9, 4], x[255, 127] = float("inf"), float("nan"), float("-inf")
    bad = [1, 3, 5, 7, 9, 255]
    rest = [t for t in range(256) if t not in bad]
    x.requires_grad_()
    weight.requires_grad_()
    config = RouterConfig(16, 4, score, groups=groups, top_groups=max(1, groups // 2))
    got = route(x, weight, config, bias, backend="triton")
    assert got.invalid == len(bad)
    assert torch.equal((~got.valid_T).nonzero().flatten(), torch.tensor(bad, device="cuda"))
    assert got.ids_TK.min() >= 0 and got.ids_TK.max() < 16
    ordered = got.ids_TK.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert got.load_E.sum() == 256 * 4
    want = route(good, weight.detach(), config, bias, backend="triton")
    assert torch.equal(got.ids_TK[rest], want.ids_TK[rest])
    assert torch.equal(got.weights_TK[rest], want.weights_TK[rest])
    assert not got.logits_TE[bad].any()
    (got.weights_TK.square().sum() + z_loss(got.logits_TE)).backward()
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert not x.grad[bad].any()
    assert x.grad[rest].any() and weight.grad.any()


def test_a_weight_that_is_not_finite_makes_every_row_invalid():
    x, weight, _ = draw(70, 64, 8)
    weight[3, 2] = float("nan")
    x.requires_grad_()
    got = route(x, weight, RouterConfig(8, 2, "softmax"), backend="triton")
    got.weights_TK.sum().backward()
    assert got.invalid == 70
    assert got.weights_TK.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_lowest_index_wins_ties_and_underflow_picks_no_expert_twice(score):
    # A weight that is the identity makes logits of the tokens themselves.
    rows = torch.zeros(6, 16)
    rows[1, [2, 5, 9]] = 2.0
    rows[2] = -300.0
    rows[3] = 300.0
    rows[4, 1:] = -200.0
    rows[5, ::2] = -0.0
    x = rows.cuda().bfloat16().requires_grad_()
    weight = torch.eye(16, device="cuda")
    config = RouterConfig(16, 4, score, renormalise=False)
    got = route(x, weight, config, backend="triton")
    want = [[0, 1, 2, 3], [2, 5, 9, 0], *[[0, 1, 2, 3]] * 4]
    assert got.ids_TK.tolist() == want
    assert got.weights_TK.isfinite().all()
    got.weights_TK.sum().backward()
    assert x.grad.isfinite().all()
    assert got.invalid == 0


def test_bias_moves_the_choice_but_not_the_weights():
    x, weight, _ = draw(200, 128, 32)
    bias = torch.zeros(32, device="cuda")
    bias[21] = 10.0
    for score in ("softmax", "sigmoid"):
        got = route(
            x, weight, RouterConfig(32, 2, score, renormalise=False), bias, backend="triton"
        )
        assert (got.ids_TK[:, 0] == 21).all()
        assert relative_error(got.weights_TK[:, 0], got.scores_TE[:, 21]) < 1e-6


def test_a_replay_is_bitwise_the_same_and_counts_once():
    x, weight, _ = draw(3000, 256, 64)
    x[1000:2000] = x[1000]
    weight[32:] = weight[:32]  # every score twice: all choices are ties
    x.requires_grad_()
    weight.requires_grad_()
    config = RouterConfig(64, 6, "sigmoid")

    def run(x, weight):
        got = route(x, weight, config, backend="triton")
        return got.weights_TK, got.ids_TK, got.load_E

    runs = []
    for _ in range(3):
        weights, ids, load = run(x, weight)
        grads = torch.autograd.grad(weights.square().sum(), (x, weight))
        runs.append((weights, ids, load, *grads))
    weights, ids, load = checkpoint(run, x, weight, use_reentrant=False)
    grads = torch.autograd.grad(weights.square().sum(), (x, weight))
    runs.append((weights, ids, load, *grads))
    assert runs[0][2].sum() == 3000 * 6
    for again in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(again, runs[0], strict=True))


def test_tokens_are_routed_alike_alone_and_in_any_batch():
    x, weight, bias = draw(20000, 1024, 64)
    config = RouterConfig(64, 8, "softmax")
    whole = route(x, weight, config, bias, backend="triton")
    clear = truth_of(x, weight, config, bias).clear
    for part in (slice(0, 1), slice(77, 677), slice(19999, 20000), slice(5000, 13500)):
        alone = route(x[part], weight, config, bias, backend="triton")
        # The order of a sum over the width may depend on how many tokens there are.
        assert relative_error(alone.logits_TE, whole.logits_TE[part]) < 1e-5
        here = clear[part]
        assert torch.equal(alone.ids_TK[here], whole.ids_TK[part][here])
        assert relative_error(alone.weights_TK[here], whole.weights_TK[part][here]) < 1e-4
    changed = x.clone()
    changed[-1] = torch.randn(1024, device="cuda")
    after = route(changed, weight, config, bias, backend="triton")
    assert torch.equal(after.ids_TK[:-1], whole.ids_TK[:-1])
    assert torch.equal(after.weights_TK[:-1], whole.weights_TK[:-1])


def strided(tensor):
    """The same values in column-major memory."""
    return tensor.t().contiguous().t()


def misaligned(tensor):
    """The same values, contiguous, one element past a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("change", [strided, misaligned])
def test_where_inputs_lie_does_not_matter(change):
    x, weight, bias = draw(500, 256, 48)
    config = RouterConfig(48, 4, "softmax")
    results = []
    for moved in (lambda tensor: tensor, change):
        leaves = [moved(tensor).detach().requires_grad_() for tensor in (x, weight)]
        got = route(*leaves, config, bias, backend="triton")
        grad = moved(torch.linspace(-1, 1, 500 * 4, device="cuda").view(500, 4))
        grads = torch.autograd.grad(got.weights_TK, leaves, grad)
        results.append((got.ids_TK, got.weights_TK, got.logits_TE, *grads))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    wide = torch.cat([x, x], 1)
    got = route(wide[:, :256], weight, config, bias, backend="triton")
    assert torch.equal(got.ids_TK, results[0][0])


def test_losses_reach_the_router():
    x, weight, _ = draw(512, 256, 16)
    weight.requires_grad_()
    config = RouterConfig(16, 2, "sigmoid")
    got = route(x, weight, config, backend="triton")
    wide = weight.detach().double().requires_grad_()
    true = truth_of(x.double(), wide, config)
    losses = {
        "z": (z_loss(got.logits_TE), z_loss(true.logits)),
        "sequence": tuple(
            sequence_balance_loss(scores, got.ids_TK, 4) for scores in (got.scores_TE, true.scores)
        ),
        "load": tuple(
            load_balance_loss(scores, got.load_E) for scores in (got.scores_TE, true.scores)
        ),
    }
    for name, (one, other) in losses.items():
        (found,) = torch.autograd.grad(one, weight, retain_graph=True)
        (want,) = torch.autograd.grad(other, wide, retain_graph=True)
        assert want.norm() > 1e-4, name
        assert relative_error(found, want) < 1e-3, name


def test_telemetry_moves_with_what_it_tells():
    x, weight, _ = draw(2000, 128, 16)
    bias = torch.zeros(16, device="cuda")
    config = RouterConfig(16, 2, "sigmoid", capacity_factor=1.0)
    even = route(x, weight, config, bias, backend="triton")
    bias[:2] = 5.0
    x[:5] = float("nan")
    skewed = route(x, weight, config, bias, backend="triton")
    assert (even.invalid, skewed.invalid) == (0, 5)
    assert skewed.load_E[:2].tolist() == [2000, 2000]
    before, after = load_stats(even.load_E), load_stats(skewed.load_E)
    assert after["imbalance"] == 8.0 and before["imbalance"] < 2.0
    assert before["entropy"] > 2.0 > after["entropy"] > 0.6
    assert (before["dead_experts"], after["dead_experts"]) == (0, 14)
    assert skewed.dropped == 2 * (2000 - 250) > even.dropped
    free = RouterConfig(16, 2, "sigmoid")
    again = apply_capacity(route(x, weight, free, bias, backend="triton"), config, bias)
    assert torch.equal(again.ids_TK, skewed.ids_TK)


def test_tokens_times_width_may_pass_two_to_the_31():
    tokens, width = 2**19, 4224
    assert tokens * width > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    config = RouterConfig(16, 2, "softmax")
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(16, width, device="cuda") * width**-0.5
    x.requires_grad_()
    weight.requires_grad_()
    whole = route(x, weight, config, backend="triton")
    grad = torch.randn(tokens, 2, device="cuda")
    grad_x, grad_weight = torch.autograd.grad(whole.weights_TK, (x, weight), grad)
    total = torch.zeros_like(grad_weight, dtype=torch.float64)
    for at in range(0, tokens, 2**15):
        part = slice(at, at + 2**15)
        piece = x[part].detach().requires_grad_()
        got = route(piece, weight, config, backend="triton")
        part_x, part_weight = torch.autograd.grad(got.weights_TK, (piece, weight), grad[part])
        same = (got.ids_TK == whole.ids_TK[part]).all(-1)
        assert same.float().mean() > 0.999
        assert relative_error(part_x[same], grad_x[part][same]) < BF16
        total += part_weight
    assert relative_error(grad_weight, total) < 0.05  # a few tokens chose otherwise


def test_it_compiles_whole():
    x, weight, bias = draw(512, 256, 32)
    x.requires_grad_()
    config = RouterConfig(32, 4, "sigmoid")

    def run(x):
        got = route(x, weight, config, bias, backend="triton")
        return got.weights_TK, got.ids_TK

    compiled = torch.compile(run, fullgraph=True)
    (weights, ids), (want, want_ids) = compiled(x), run(x)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want)
    grads = [torch.autograd.grad(w.square().sum(), x)[0] for w in (weights, want)]
    assert torch.equal(*grads)


def test_a_captured_graph_replays_on_new_tokens():
    x, weight, bias = draw(512, 256, 32)
    config = RouterConfig(32, 4, "sigmoid")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            route(x, weight, config, bias, backend="triton")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(x, weight, config, bias, backend="triton")
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        want = route(x, weight, config, bias, backend="triton")
        assert torch.equal(captured.ids_TK, want.ids_TK)
        assert torch.equal(captured.weights_TK, want.weights_TK)
        assert torch.equal(captured.load_E, want.load_E)
