"""The whole layer, forward and every gradient, on each backend against the per-token oracle."""

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import KernelError, MoE, RouterConfig, moe, route
from torch.utils.checkpoint import checkpoint

BACKENDS = ("torch", "reference")
# Relative, norm over norm: fp32 sums of about a hundred terms, bf16 at its 8 bits of mantissa.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}


def make_layer(config, width=16, expert_width=12, dtype=torch.float32, **options):
    layer = MoE(width, expert_width, config, dtype=dtype, **options)
    layer.reset_parameters(torch.Generator().manual_seed(3))
    layer.router.bias.copy_(0.05 * torch.randn(config.experts))
    return layer


def gradients(y, inputs, grad):
    return torch.autograd.grad((y * grad.to(y.dtype)).sum(), inputs, allow_unused=True)


def check_against_oracle(layer, x):
    """Compares y and the gradients of x, router weight, gate_up and down with fp64 truth."""
    config, bias = layer.router.config, layer.router.bias
    x = x.detach().requires_grad_()
    weights = (layer.router.weight, layer.gate_up, layer.down)
    y, routing = layer(x)
    grad = torch.randn(x.shape)
    got = gradients(y, (x, *weights), grad)

    wide = [v.detach().double().requires_grad_() for v in (x, *weights)]
    want = oracle.layer(*wide, config, bias.double(), ids=routing.ids_TK)
    # fp32 cannot be held to a choice that scores closer than its rounding decide.
    clear = want.gaps > 1e-5
    assert clear.float().mean() > 0.6
    assert torch.equal(routing.ids_TK[clear], want.choice[clear])
    tolerance = TOLERANCE[x.dtype]
    assert y.dtype == x.dtype
    assert oracle.relative_error(y, want.y) < tolerance
    for name, one, other in zip(
        ("x", "router", "gate_up", "down"), got, gradients(want.y, wide, grad), strict=True
    ):
        assert other.norm() > 1e-3, name
        assert oracle.relative_error(one, other) < tolerance, name
    return routing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("recompute", [False, True])
def test_output_and_gradients_are_the_oracles(backend, dtype, score, recompute):
    config = RouterConfig(8, 3, score, scale=1.5)
    layer = make_layer(config, dtype=dtype, backend=backend, recompute=recompute)
    check_against_oracle(layer, torch.randn(21, 16, dtype=dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 4), (64, 2), (16, 1), (128, 8)])
def test_any_number_of_experts(backend, experts, top_k):
    config = RouterConfig(experts, top_k, "sigmoid", renormalise=False)
    layer = make_layer(config, backend=backend)
    check_against_oracle(layer, torch.randn(6, 16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "expert_width"), [(10, 7), (5, 3), (12, 6), (8, 9), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_need_not_be_aligned(backend, width, expert_width, dtype):
    config = RouterConfig(4, 2, "sigmoid", renormalise=False)
    layer = make_layer(config, width, expert_width, dtype, backend=backend)
    check_against_oracle(layer, torch.randn(11, width, dtype=dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_load_with_idle_experts(backend, poisoned_memory):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), backend=backend)
    layer.router.bias.copy_(torch.tensor([9.0, 0, 8, -9, 7.9, -9, 0, -9]))
    x = torch.randn(30, 16)
    with torch.no_grad():
        layer.router.weight[2] = 5 * x[0]  # expert 2 wins some tokens, 4 the others
        layer.router.weight[4] = -5 * x[0]
    routing = check_against_oracle(layer, x)
    assert routing.load_E[0] == 30
    assert 0 < routing.load_E[2] < 30
    assert routing.load_E[2] + routing.load_E[4] == 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_tokens_has_exactly_zero_gradient(backend, poisoned_memory):
    layer = make_layer(RouterConfig(6, 1, "softmax"), backend=backend)
    layer.router.bias.copy_(torch.tensor([0.0, 0, 0, 5, 0, 0]))
    y, routing = layer(torch.randn(7, 16))
    y.sum().backward()
    assert routing.load_E.tolist() == [0, 0, 0, 7, 0, 0]
    others = [0, 1, 2, 4, 5]
    for grad in (layer.gate_up.grad, layer.down.grad):
        assert not grad[others].any()
        assert grad[3].isfinite().all()
        assert grad[3].any()


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_dropped_assignments_never_leak(backend, overflow, poisoned_memory):
    config = RouterConfig(8, 3, "sigmoid", capacity_factor=0.5, overflow=overflow)
    layer = make_layer(config, backend=backend)
    x = torch.randn(20, 16, requires_grad=True)
    weights = (layer.router.weight, layer.gate_up, layer.down)
    y, routing = layer(x)
    grad = torch.randn(20, 16)
    got = gradients(y, (x, *weights), grad)
    assert routing.dropped > 20

    wide = [v.detach().double().requires_grad_() for v in (x, *weights)]
    shares = oracle.token_weights
    rows = []
    for t, chosen in enumerate(routing.ids_TK.tolist()):
        _, scores, _, _ = oracle.token_choice(wide[0][t], wide[1], config, None)
        free = route(x[t : t + 1], weights[0], RouterConfig(8, 3, "sigmoid"), layer.router.bias)
        named = [e if e < 8 else f for e, f in zip(chosen, free.ids_TK[0].tolist(), strict=True)]
        terms = zip(chosen, shares(scores, named, config), strict=True)
        kept = [w * oracle.expert(wide[0][t], wide[2][e], wide[3][e]) for e, w in terms if e < 8]
        rows.append(sum(kept, 0 * wide[0][t]))
    want = torch.stack(rows)
    assert oracle.relative_error(y, want) < 5e-6
    for one, other in zip(got, gradients(want, wide, grad), strict=True):
        assert oracle.relative_error(one, other) < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_lost_every_expert_gives_zero(backend, poisoned_memory):
    layer = make_layer(RouterConfig(4, 2, "sigmoid"), backend=backend)
    x = torch.randn(3, 16, requires_grad=True)
    routing = layer.router(x)
    routing.ids_TK = torch.tensor([[4, 4], [1, 4], [4, -1]])
    y = moe(x, routing, layer.gate_up, layer.down, backend=backend)
    y.sum().backward()
    assert not y[[0, 2]].any()
    assert not x.grad[[0, 2]].any()
    assert y[1].any()
    assert x.grad.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens(backend, shape, poisoned_memory):
    layer = make_layer(RouterConfig(4, 2, "sigmoid"), backend=backend)
    x = torch.empty(shape, requires_grad=True)
    y, routing = layer(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    assert routing.load_E.tolist() == [0] * 4
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_rows_give_zero_and_harm_no_other(backend):
    layer = make_layer(RouterConfig(8, 2, "softmax"), backend=backend)
    x = torch.randn(9, 16)
    want = layer(x[[0, 1, 3, 4, 6, 7]])[0]
    x[2], x[5, 1], x[8, 0] = float("nan"), float("inf"), float("-inf")
    x.requires_grad_()
    y, routing = layer(x)
    y.square().sum().backward()
    assert routing.invalid == 3
    assert not y[[2, 5, 8]].any()
    torch.testing.assert_close(y[[0, 1, 3, 4, 6, 7]], want, rtol=1e-5, atol=1e-6)
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_outputs_are_summed_in_fp32(backend):
    # Sixteen equal experts whose weights sum to 1 give what one gives, to the last bit of bf16.
    layer = make_layer(RouterConfig(16, 16, "sigmoid"), dtype=torch.bfloat16, backend=backend)
    with torch.no_grad():
        for weight in (layer.gate_up, layer.down):
            weight.copy_(weight[:1].clone().expand_as(weight))
    x = torch.randn(20, 16).bfloat16()
    one = moe(
        x,
        route(x, layer.router.weight[:1], RouterConfig(1, 1, "sigmoid")),
        layer.gate_up[:1],
        layer.down[:1],
        backend=backend,
    )
    assert torch.equal(layer(x)[0], one)


def test_gradcheck_of_the_reference_in_fp64():
    config = RouterConfig(5, 2, "sigmoid")
    shapes = ((6, 4), (5, 4), (5, 6, 4), (5, 4, 3))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(x, router, gate_up, down):
        return moe(x, route(x, router, config), gate_up, down, backend="reference")

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_of_a_sequence_does_not_depend_on_the_batch(backend):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), backend=backend)
    x = torch.randn(4, 10, 16)
    batched, _ = layer(x)
    for row, together in zip(x, batched, strict=True):
        torch.testing.assert_close(layer(row)[0], together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_last_token_leaves_earlier_positions_bitwise(backend):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), backend=backend)
    x = torch.randn(1, 64, 16)
    changed = x.clone()
    changed[0, -1] = torch.randn(16)
    # The last token may move between experts, so a row's place in its group may not matter.
    assert torch.equal(layer(x)[0][0, :-1], layer(changed)[0][0, :-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_bitwise_the_same(backend):
    layer = make_layer(RouterConfig(16, 4, "sigmoid"), 64, 32, backend=backend)
    x = torch.randn(200, 64, requires_grad=True)
    inputs = (x, *layer.parameters())
    runs = [gradients(layer(x)[0], inputs, torch.ones(200, 64)) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_recompute_changes_no_bit_and_keeps_less():
    x = torch.randn(50, 16, requires_grad=True)
    results, kept = [], []
    for recompute in (False, True):
        layer = make_layer(RouterConfig(8, 2, "sigmoid"), recompute=recompute)
        layer.router.bias.zero_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            y, _ = layer(x)
        results.append([y, *gradients(y, (x, *layer.parameters()), torch.ones(50, 16))])
        kept.append(sum(saved))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[0] - kept[1] == 50 * 2 * 2 * 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_inputs_and_gradients_do_not_matter(backend):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), backend=backend)
    x = torch.randn(15, 16)
    routing = layer.router(x)
    grad = torch.randn(15, 16)
    inputs = [v.detach().requires_grad_() for v in (x, layer.gate_up, layer.down)]
    y = moe(inputs[0], routing, *inputs[1:], backend=backend)
    want = [y, *gradients(y, inputs, grad)]
    strided = [
        v.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for v in inputs
    ]
    assert not any(v.is_contiguous() for v in strided)
    y = moe(strided[0], routing, *strided[1:], backend=backend)
    got = [y, *torch.autograd.grad(y, strided, grad.t().contiguous().t())]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    moe(strided[0], routing, *strided[1:], backend=backend).sum().backward()


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_takes_no_gradient_and_the_rest_is_unchanged(frozen):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    x = torch.randn(15, 16, requires_grad=True)
    inputs = [x, layer.router.weight, layer.gate_up, layer.down]
    want = gradients(layer(x)[0], inputs, torch.ones(15, 16))
    inputs[frozen].requires_grad_(False)
    rest = [i for i in range(4) if i != frozen]
    got = gradients(layer(x)[0], [inputs[i] for i in rest], torch.ones(15, 16))
    assert all(torch.equal(g, want[i]) for g, i in zip(got, rest, strict=True))


def test_activation_checkpointing_replays_the_same_routes_and_counts_once():
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    x = torch.randn(30, 16)
    x[3:20] = x[3]  # equal rows make ties between tokens, equal router rows between experts
    with torch.no_grad():
        layer.router.weight[4:] = layer.router.weight[:4]
    layer.router.bias.zero_()
    x.requires_grad_()
    inputs = (x, *layer.parameters())
    plain_y, plain = layer(x)
    want = gradients(plain_y, inputs, torch.ones(30, 16))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    y, routing = checkpoint(layer, x, use_reentrant=False)
    got = gradients(y, inputs, torch.ones(30, 16))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(routing.load_E, plain.load_E)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_compiles_without_a_graph_break():
    layer = make_layer(RouterConfig(8, 2, "sigmoid", groups=4, top_groups=2))
    x = torch.randn(15, 16, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = (x, *layer.parameters())
    want_y, want_routing = layer(x)
    y, routing = compiled(x)
    assert torch.equal(routing.ids_TK, want_routing.ids_TK)
    torch.testing.assert_close(y, want_y)
    got, want = (gradients(v, inputs, torch.ones(15, 16)) for v in (y, want_y))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_of_another_dtype_are_cast_and_get_gradients_in_their_own():
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    x = torch.randn(15, 16).bfloat16()
    y, _ = layer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.gate_up.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_tokens_decides_not_autocast(backend, dtype):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), backend=backend)
    x = torch.randn(15, 16, dtype=dtype)
    want, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x)[0], want)


def test_router_stays_fp32_when_the_model_is_cast():
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    weight, bias = layer.router.weight.clone(), layer.router.bias.clone()
    layer.bfloat16()
    assert layer.gate_up.dtype == torch.bfloat16
    assert torch.equal(layer.router.weight, weight)
    assert torch.equal(layer.router.bias, bias)
    assert layer.router.weight.dtype == layer.router.bias.dtype == torch.float32
    assert isinstance(layer.router.weight, torch.nn.Parameter)
    layer.to("meta")
    assert layer.router.weight.is_meta
    assert layer.router.bias.dtype == torch.float32


def test_state_has_stable_names_and_loads():
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "router.weight": (8, 16),
        "router.bias": (8,),
        "gate_up": (8, 24, 16),
        "down": (8, 16, 12),
    }
    other = MoE(16, 12, RouterConfig(8, 2, "sigmoid"))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(other(x)[0], layer(x)[0])


def test_reset_draws_from_the_generator_given():
    layers = [MoE(16, 12, RouterConfig(8, 2, "sigmoid")) for _ in range(3)]
    for layer, seed in zip(layers, (1, 1, 2), strict=True):
        layer.reset_parameters(torch.Generator().manual_seed(seed))
    assert torch.equal(layers[0].down, layers[1].down)
    assert not torch.equal(layers[0].down, layers[2].down)
    assert layers[0].gate_up.std().item() == pytest.approx(16**-0.5, rel=0.1)
    assert not torch.equal(layers[0].gate_up[0], layers[0].gate_up[1])


def test_routing_is_a_pytree_so_that_wrappers_find_its_tensors():
    layer = make_layer(RouterConfig(8, 2, "sigmoid"))
    leaves = torch.utils._pytree.tree_leaves(layer(torch.randn(5, 16)))
    assert len(leaves) == 9
    assert [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)] == ["sigmoid"]


@pytest.mark.parametrize(
    ("name", "gate_up", "down"),
    [
        ("gate_up", (4, 12, 8), (4, 8, 12)),
        ("down", (4, 24, 8), (4, 12, 12)),
        ("load_E", (3, 24, 8), (3, 8, 12)),
        ("gate_up", (3, 24, 8), (4, 8, 12)),
        ("gate_up", (24, 8), (4, 8, 12)),
        ("down", (4, 24, 8), (8, 12)),
    ],
)
def test_a_shape_that_does_not_fit_is_named(name, gate_up, down):
    x = torch.randn(5, 8)
    routing = route(x, torch.randn(4, 8), RouterConfig(4, 2, "softmax"))
    with pytest.raises(KernelError, match=rf"E-MOE-SHAPE: .*{name} has shape"):
        moe(x, routing, torch.zeros(gate_up), torch.zeros(down))
