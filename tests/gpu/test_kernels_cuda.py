"""The layer on CUDA against the same per-token oracle, and what only a GPU can show.

fp32 goes through torch's own loop over groups behind grouped_mm, which reads the offsets on the
host; bf16 takes its grouped kernel, which may not.
"""

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import MoE, RouterConfig, Routing, group_rows, moe, pick_backend, route
from nmoe_kernels.hardware import FUSED, why_unusable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("seeded"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TYPES = (torch.float32, torch.bfloat16)
CASES = [
    ("cute", torch.bfloat16),
    ("triton", torch.bfloat16),
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
    ("reference", torch.float32),
    ("reference", torch.bfloat16),
]
# Relative, norm over norm: fp32 without TF32, bf16 at its 8 bits of mantissa.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def skip_if_unusable(backend, dtype):
    refusal = why_unusable(backend, "cuda", dtype)
    if refusal:
        pytest.skip(refusal)


def make_layer(config, width=32, expert_width=16, dtype=torch.float32, **options):
    layer = MoE(width, expert_width, config, dtype=dtype, device="cuda", **options)
    layer.reset_parameters(torch.Generator("cuda").manual_seed(3))
    return layer


def gradients(y, inputs, grad):
    return torch.autograd.grad((y * grad.to(y)).sum(), inputs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
@pytest.mark.parametrize(("width", "expert_width"), [(32, 16), (20, 12), (10, 7)])
def test_output_and_gradients_are_the_oracles(
    backend, dtype, score, recompute, width, expert_width, poisoned_memory
):
    skip_if_unusable(backend, dtype)
    config = RouterConfig(8, 3, score, scale=1.5)
    layer = make_layer(config, width, expert_width, dtype, backend=backend, recompute=recompute)
    x = torch.randn(21, width).to("cuda", dtype).requires_grad_()
    weights = (layer.router.weight, layer.gate_up, layer.down)
    y, routing = layer(x)
    grad = torch.randn(21, width)
    wide = [v.detach().double().cpu().requires_grad_() for v in (x, *weights)]
    want = oracle.layer(*wide, config, ids=routing.ids_TK)
    clear = want.gaps > 1e-5
    assert torch.equal(routing.ids_TK.cpu()[clear], want.choice[clear])
    assert oracle.relative_error(y, want.y) < TOLERANCE[dtype]
    got = gradients(y, (x, *weights), grad)
    for one, other in zip(got, gradients(want.y, wide, grad), strict=True):
        assert oracle.relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_idle_experts_and_dropped_rows_leave_no_garbage(backend, dtype, poisoned_memory):
    skip_if_unusable(backend, dtype)
    config = RouterConfig(8, 2, "sigmoid", capacity_factor=0.75)
    layer = make_layer(config, dtype=dtype, backend=backend)
    layer.router.bias.copy_(torch.tensor([9.0, 9, 8, 8, 0, 0, 0, 0]))
    x = torch.randn(40, 32).to("cuda", dtype).requires_grad_()
    y, routing = layer(x)
    y.square().sum().backward()
    assert routing.dropped > 0
    assert y.isfinite().all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.isfinite().all()
    assert not layer.gate_up.grad[routing.load_E == 0].any()
    assert not layer.down.grad[routing.load_E == 0].any()
    lost = (routing.ids_TK == 8).all(-1)
    assert lost.any()
    assert not y[lost].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_no_tokens(dtype):
    layer = make_layer(RouterConfig(8, 2, "sigmoid"), dtype=dtype)
    y, routing = layer(torch.empty(0, 32, device="cuda", dtype=dtype, requires_grad=True))
    y.sum().backward()
    assert routing.load_E.sum() == 0
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_choice_on_ties_and_bad_rows_is_that_of_the_cpu():
    x = torch.randint(-2, 3, (64, 16)).float()
    x[3], x[9, 1], x[20] = float("nan"), float("inf"), float("-inf")
    config = RouterConfig(16, 4, "sigmoid", groups=4, top_groups=2)
    want, got = (route(x.to(d), torch.eye(16, device=d), config) for d in ("cpu", "cuda"))
    assert torch.equal(got.ids_TK.cpu(), want.ids_TK)
    assert got.invalid == want.invalid == 3
    assert torch.equal(got.load_E.cpu(), want.load_E)
    on_cpu, on_gpu = group_rows(want.ids_TK, 16), group_rows(got.ids_TK, 16)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("factor", [None, 0.75])
def test_bf16_never_waits_for_the_device(factor, backend):
    config = RouterConfig(8, 2, "sigmoid", capacity_factor=factor)
    layer = make_layer(config, 64, 32, torch.bfloat16, backend=backend)
    x = torch.randn(128, 64, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    layer(x)[0].backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)[0].backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", TYPES)
def test_runs_are_bitwise_the_same(dtype):
    layer = make_layer(RouterConfig(32, 4, "sigmoid"), 256, 128, dtype)
    x = torch.randn(2048, 256).to("cuda", dtype).requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn(2048, 256)
    first, *others = (gradients(layer(x)[0], inputs, grad) for _ in range(5))
    for run in others:
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


def test_rows_times_width_may_pass_two_to_the_31():
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    tokens, top_k, width = 2**18, 8, 1056
    assert tokens * top_k * width > 2**31
    layer = make_layer(RouterConfig(16, top_k, "sigmoid"), width, 32, torch.bfloat16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = (layer.gate_up, layer.down)
    grad = torch.randn_like(x)
    routing = layer.router(x.detach())

    def run(part):
        piece = x[part].detach().requires_grad_()
        chosen = route(piece.detach(), layer.router.weight, layer.router.config)
        y = moe(piece, chosen, *weights)
        return [y.detach(), *torch.autograd.grad(y, (piece, *weights), grad[part])]

    whole = run(slice(None))
    parts = [run(slice(at, at + 2**14)) for at in range(0, tokens, 2**14)]
    assert routing.load_E.sum() == tokens * top_k
    for part, at in ((parts[0], slice(0, 2**14)), (parts[-1], slice(tokens - 2**14, None))):
        assert oracle.relative_error(whole[0][at], part[0]) < 2e-2
        assert oracle.relative_error(whole[1][at], part[1]) < 2e-2
    for index in (2, 3):
        assert oracle.relative_error(whole[index], sum(p[index].double() for p in parts)) < 2e-2


@pytest.mark.parametrize("routing", ["uniform", "zipf", "onehot"])
@pytest.mark.parametrize(
    ("tokens", "width", "expert_width", "experts", "top_k"),
    [(4096, 2048, 1024, 64, 8), (3000, 1536, 256, 128, 8), (1, 512, 320, 16, 2)],
)
def test_triton_at_real_sizes_is_the_reference_in_fp64(
    tokens, width, expert_width, experts, top_k, routing
):
    skew = torch.arange(1, experts + 1, device="cuda").float()
    popularity = {"uniform": skew * 0, "zipf": -skew.log(), "onehot": -10.0 * skew}[routing]
    gumbel = -torch.rand(tokens, experts, device="cuda").log().neg().log()
    ids = (popularity + gumbel).topk(top_k, dim=-1).indices
    if routing == "onehot":
        ids[:] = torch.arange(top_k, device="cuda")
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    gate_up = torch.randn(experts, 2 * expert_width, width, device="cuda") * width**-0.5
    down = torch.randn(experts, width, expert_width, device="cuda") * expert_width**-0.5
    weights, grad = torch.rand(tokens, top_k, device="cuda"), torch.randn_like(x)
    given = (x, weights, gate_up.bfloat16(), down.bfloat16())

    def run(backend, convert):
        inputs = [convert(tensor).detach().requires_grad_() for tensor in given]
        chosen = routed(ids, inputs[1], experts)
        y = moe(inputs[0], chosen, *inputs[2:], backend=backend)
        return [y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]

    got, want = run("triton", lambda tensor: tensor), run("reference", torch.Tensor.double)
    for one, other in zip(got, want, strict=True):
        assert oracle.relative_error(one, other) < TOLERANCE[torch.bfloat16]


def routed(ids, weights, experts):
    """A Routing with these choices."""
    tokens = ids.shape[0]
    return Routing(
        ids_TK=ids,
        weights_TK=weights,
        logits_TE=torch.zeros(tokens, experts, device=ids.device),
        score="softmax",
        load_E=torch.bincount(ids.flatten(), minlength=experts),
        invalid=torch.zeros((), dtype=torch.int64, device=ids.device),
        valid_T=torch.ones(tokens, dtype=torch.bool, device=ids.device),
        dropped=torch.zeros((), dtype=torch.int64, device=ids.device),
    )


def test_the_plan_puts_the_rows_where_the_grouping_does():
    from nmoe_kernels.gemm.plan import TILE_ROWS, plan_rows

    ids = torch.rand(3001, 48, device="cuda").topk(6, dim=-1).indices
    ids[::7, 2] = 48
    plan, grouping = plan_rows(ids, 48), group_rows(ids, 48)
    counts = grouping.offsets_E1.diff()
    lengths = (counts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    assert torch.equal(plan.offsets_E1[1:], lengths.cumsum(0).int())
    shift = (plan.offsets_E1 - grouping.offsets_E1)[:-1].repeat_interleave(counts)
    rows = torch.arange(len(shift), device="cuda") + shift
    assert torch.equal(plan.flat_P[rows].long(), grouping.order_M[: len(rows)])
    assert torch.equal(plan.token_P[rows].long(), grouping.token_M[: len(rows)])
    assert (plan.token_P[: plan.offsets_E1[-1]] >= 0).sum() == len(rows)
    kept = grouping.kept_TK
    assert torch.equal(plan.inverse_TK[kept].long(), rows[grouping.inverse_TK[kept]])
    assert (plan.inverse_TK[~kept] == -1).all()
    assert torch.equal(
        plan.tile_expert_N[: plan.tiles],
        torch.arange(48, device="cuda").repeat_interleave(lengths // TILE_ROWS).int(),
    )


def test_a_captured_graph_replays_the_layer_on_new_tokens():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"), 256, 128, torch.bfloat16, backend="triton")
    x, grad = (torch.randn(512, 256, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()
    inputs = (x, *layer.parameters())

    def step():
        return torch.autograd.grad(layer(x)[0], inputs, grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_the_layer_compiles_whole():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"), 256, 128, torch.bfloat16, backend="triton")
    x = torch.randn(512, 256, device="cuda").bfloat16().requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn(512, 256)
    compiled = torch.compile(layer, fullgraph=True)
    want, got = (gradients(run(x)[0], inputs, grad) for run in (layer, compiled))
    for one, other in zip(got, want, strict=True):
        assert oracle.relative_error(one, other) < 1e-2


@pytest.mark.parametrize("dtype", TYPES)
def test_a_backend_is_picked_for_cuda(dtype):
    usable = [name for name in FUSED if why_unusable(name, "cuda", dtype) is None]
    wanted = usable[0] if dtype == torch.bfloat16 else "torch"
    assert pick_backend(None, "cuda", dtype) == wanted
    assert pick_backend(None, "cuda", torch.float64) == "reference"
