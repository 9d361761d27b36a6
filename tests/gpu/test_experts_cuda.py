"""The fused experts on CUDA, every backend: launches, and the faults that others have had.

The truth is the loop over experts in fp64, which the CPU tests compare with a loop over tokens.

Letters: T tokens, H width, I expert width, E experts, K experts per token.
"""

import pytest
import torch
from moe_oracle import relative_error
from nmoe_kernels import MoE, RouterConfig, Routing, moe, route
from nmoe_kernels.gemm import products
from nmoe_kernels.gemm.launches import CANDIDATES, forced, launch_for
from nmoe_kernels.hardware import BACKEND_VARIABLE, FUSED, why_unusable
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("seeded"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 keeps 8 bits; inputs are of unit scale and errors are norm over norm.
TOLERANCE = 2e-2
LAUNCHES = [(product, launch) for product, known in CANDIDATES.items() for launch in known]


@pytest.fixture(autouse=True, params=FUSED)
def backend(request, monkeypatch):
    """The backend that is picked where none is asked for."""
    refusal = why_unusable(request.param, "cuda", torch.bfloat16)
    if refusal:
        pytest.skip(refusal)
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    torch._dynamo.reset()  # a compiled layer keeps the backend that it was compiled for
    return request.param


def routed(ids, weights, experts):
    """A Routing with these choices."""
    tokens = ids.shape[0]
    kept = ids[(ids >= 0) & (ids < experts)]
    return Routing(
        ids_TK=ids,
        weights_TK=weights,
        logits_TE=torch.zeros(tokens, experts, device=ids.device),
        score="softmax",
        load_E=torch.bincount(kept, minlength=experts),
        invalid=torch.zeros((), dtype=torch.int64, device=ids.device),
        valid_T=torch.ones(tokens, dtype=torch.bool, device=ids.device),
        dropped=torch.zeros((), dtype=torch.int64, device=ids.device),
    )


def draw(tokens, width, expert_width, experts, top_k):
    """ids, and x, the router's weights, gate_up, down in bf16 (the weights of a token in fp32)."""
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=-1).indices
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    gate_up = torch.randn(experts, 2 * expert_width, width, device="cuda") * width**-0.5
    down = torch.randn(experts, width, expert_width, device="cuda") * expert_width**-0.5
    weights = torch.rand(tokens, top_k, device="cuda")
    return ids, (x, weights, gate_up.bfloat16(), down.bfloat16())


def run(ids, given, grad, backend=None, **options):
    """Output and the gradients of what is given."""
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    experts = given[2].shape[0]
    y = moe(inputs[0], routed(ids, inputs[1], experts), *inputs[2:], backend=backend, **options)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


def check(ids, given, **options):
    """Against fp64; returns ours."""
    grad = torch.randn_like(given[0])
    got = run(ids, given, grad, **options)
    want = run(ids, [tensor.double() for tensor in given], grad, "reference")
    names = ("y", "x", "weights", "gate_up", "down")
    for name, one, other in zip(names, got, want, strict=True):
        assert one.isfinite().all(), name
        assert relative_error(one, other) < TOLERANCE, name
    return got


def make_layer(config, width=256, expert_width=128, **options):
    layer = MoE(width, expert_width, config, device="cuda", dtype=torch.bfloat16, **options)
    layer.reset_parameters(torch.Generator("cuda").manual_seed(3))
    return layer


@pytest.mark.parametrize(
    ("product", "launch"), LAUNCHES, ids=[f"{p}-{number}" for number, (p, _) in enumerate(LAUNCHES)]
)
def test_every_tuning_choice_is_right(product, launch, backend, monkeypatch, poisoned_memory):
    if backend != "triton":
        pytest.skip("choices are those of the Triton kernels")
    used = []

    def noted(name, *sizes):
        used.append((name, launch_for(name, *sizes)))
        return used[-1][1]

    monkeypatch.setattr(products, "launch_for", noted)
    # Whole tiles; then widths that cut the last tile and the last step, and idle experts.
    for sizes in ((2048, 1024, 512, 16, 4), (777, 328, 200, 24, 3)):
        ids, given = draw(*sizes)
        idle = (ids == 5).any(-1)
        ids[idle] = torch.arange(sizes[4], device="cuda") + 6
        with forced(product, launch):
            check(ids, given)
    assert (product, launch) in used


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "expert_width", "experts", "top_k"),
    [
        (4096, 4096, 1024, 32, 8),
        (4096, 2048, 1408, 64, 6),
        (4096, 1536, 256, 128, 8),
        (1024, 7168, 2048, 16, 8),
        (1, 256, 128, 8, 2),
        (130, 40, 24, 3, 3),
        (5000, 64, 64, 512, 10),
        (700, 128, 96, 64, 32),
    ],
)
def test_at_real_sizes_it_is_fp64(
    tokens, width, expert_width, experts, top_k, recompute, poisoned_memory
):
    ids, given = draw(tokens, width, expert_width, experts, top_k)
    check(ids, given, recompute=recompute)


def test_one_expert_may_take_all_tokens_and_the_rest_have_no_gradient(poisoned_memory):
    ids, given = draw(3000, 256, 136, 16, 2)
    ids[:] = torch.tensor([3, 11], device="cuda")
    _, _, _, grad_gate_up, grad_down = check(ids, given)
    idle = [e for e in range(16) if e not in (3, 11)]
    for grad in (grad_gate_up, grad_down):
        assert not grad[idle].any()
        assert grad[[3, 11]].any(-1).any(-1).all()


def test_dropped_slots_of_any_kind_add_nothing(poisoned_memory):
    ids, given = draw(500, 128, 72, 8, 3)
    ids[::3, 0], ids[::5, 1], ids[7] = 8, -1, 8
    x, weights, gate_up, down = given
    grad = torch.randn_like(x)
    got = run(ids, given, grad)
    kept = (ids >= 0) & (ids < 8)
    # fp64, with the dropped slots at weight 0 through expert 0.
    masked = [x.double(), weights.double() * kept, gate_up.double(), down.double()]
    want = run(torch.where(kept, ids, 0), masked, grad, "reference")
    for index in (0, 1, 3, 4):
        assert relative_error(got[index], want[index]) < TOLERANCE
    assert relative_error(got[2][kept], want[2][kept]) < TOLERANCE
    assert not got[2][~kept].any()
    assert not got[0][7].any() and not got[1][7].any()


def test_rows_that_are_not_finite_reach_no_other(poisoned_memory):
    layer = make_layer(RouterConfig(16, 4, "softmax"))
    x = torch.randn(600, 256, device="cuda").bfloat16()
    clean = x.clone()
    bad = [0, 129, 599]
    rest = [t for t in range(600) if t not in bad]
    x[0], x[129, 7], x[599, 255] = float("nan"), float("inf"), float("-inf")
    x.requires_grad_()
    y, routing = layer(x)
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, *layer.parameters()), grad)
    assert routing.invalid == 3
    assert not y[bad].any() and not grads[0][bad].any()
    assert torch.equal(y[rest], layer(clean)[0][rest])
    assert all(g.isfinite().all() for g in grads)


def test_runs_are_bitwise_the_same_in_any_memory(poisoned_memory):
    layer = make_layer(RouterConfig(64, 6, "sigmoid"), 512, 200)
    x = torch.randn(4000, 512, device="cuda").bfloat16().requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn(4000, 512, device="cuda").bfloat16()
    first = None
    for number in range(6):
        hold = torch.empty((number + 1) * 12345, device="cuda")
        y, _ = layer(x)
        results = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
        first = first or results
        assert all(torch.equal(one, other) for one, other in zip(results, first, strict=True))
        assert hold.isnan().all()


def test_a_sequence_alone_and_in_a_batch_gives_the_same():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(8, 500, 256, device="cuda").bfloat16()
    batched, routing = layer(x)
    ids = routing.ids_TK.view(8, 500, 4)
    for row in range(8):
        alone, own = layer(x[row])
        same = (own.ids_TK == ids[row]).all(-1)
        assert same.float().mean() > 0.98  # near ties may go either way
        assert relative_error(alone[same], batched[row][same]) < 1e-2
        # Of the same choice and weights, the experts make the same bits.
        again = moe(x[row], own, layer.gate_up, layer.down)
        both = torch.cat([x[row], x[row - 1]])
        doubled = routed(own.ids_TK.repeat(2, 1), own.weights_TK.repeat(2, 1), 16)
        assert torch.equal(moe(both, doubled, layer.gate_up, layer.down)[:500], again)


def test_a_changed_last_token_leaves_all_earlier_bits():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(1, 1000, 256, device="cuda").bfloat16()
    before = layer(x)[0]
    for _ in range(4):
        changed = x.clone()
        changed[0, -1] = torch.randn(256, device="cuda")
        assert torch.equal(layer(changed)[0][0, :-1], before[0, :-1])


def test_the_task_loss_reaches_the_router():
    layer = make_layer(RouterConfig(16, 4, "softmax"))
    x = torch.randn(700, 256, device="cuda").bfloat16()
    y, routing = layer(x)
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, layer.router.weight, grad)
    wide = layer.router.weight.detach().double().requires_grad_()
    scores = (x.double() @ wide.t()).softmax(-1).gather(-1, routing.ids_TK)
    weights = scores / scores.sum(-1, keepdim=True)
    true = moe(
        x.double(),
        routed(routing.ids_TK, weights, 16),
        layer.gate_up.double(),
        layer.down.double(),
        backend="reference",
    )
    (want,) = torch.autograd.grad(true, wide, grad.double())
    assert want.norm() > 1.0
    assert relative_error(found, want) < TOLERANCE


def test_checkpointing_replays_the_routes_and_counts_once():
    layer = make_layer(RouterConfig(32, 4, "sigmoid"))
    with torch.no_grad():
        layer.router.weight[16:] = layer.router.weight[:16]  # every choice is a tie
    x = torch.randn(900, 256, device="cuda").bfloat16()
    x[100:500] = x[100]
    x.requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn(900, 256, device="cuda").bfloat16()
    plain, routing = layer(x)
    want = torch.autograd.grad(plain, inputs, grad)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    for reentrant in (False, True):
        y, replayed = checkpoint(layer, x, use_reentrant=reentrant)
        if reentrant:  # it only takes .backward()
            y.backward(grad)
            got = [tensor.grad for tensor in inputs]
        else:
            got = torch.autograd.grad(y, inputs, grad)
        assert torch.equal(y, plain)
        assert torch.equal(replayed.ids_TK, routing.ids_TK)
        assert torch.equal(replayed.load_E, routing.load_E)
        assert routing.load_E.sum() == 900 * 4
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(600, 256, device="cuda").bfloat16().requires_grad_()
    inputs = (x, *layer.parameters())
    y, _ = layer(x)
    grads = [torch.randn_like(y) for _ in range(2)]
    first = torch.autograd.grad(y, inputs, grads[0], retain_graph=True)
    torch.autograd.grad(y, inputs, grads[1], retain_graph=True)
    again = torch.autograd.grad(y, inputs, grads[0])
    assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, grads[0])


def test_only_what_is_wanted_is_computed_and_is_the_same():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(600, 256, device="cuda").bfloat16().requires_grad_()
    inputs = [x, layer.router.weight, layer.gate_up, layer.down]
    grad = torch.randn_like(x)
    want = torch.autograd.grad(layer(x)[0], inputs, grad)
    for frozen in range(4):
        for tensor in inputs:
            tensor.requires_grad_()
        inputs[frozen].requires_grad_(False)
        rest = [n for n in range(4) if n != frozen]
        got = torch.autograd.grad(layer(x)[0], [inputs[n] for n in rest], grad)
        assert all(torch.equal(g, want[n]) for g, n in zip(got, rest, strict=True)), frozen


def transposed(tensor):
    """The same values with the last two dimensions exchanged in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def misaligned(tensor):
    """The same values, contiguous, one element past a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def spaced(tensor):
    """The same values, every second one of a tensor twice as wide."""
    room = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device="cuda")
    view = room[..., ::2]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("which", ["x", "weights", "gate_up", "down", "grad", "ids", "all"])
@pytest.mark.parametrize("change", [transposed, misaligned, spaced])
def test_where_tensors_lie_does_not_matter(change, which, poisoned_memory):
    ids, given = draw(400, 192, 80, 12, 3)
    grad = torch.randn_like(given[0])
    want = run(ids, given, grad)
    names = ("x", "weights", "gate_up", "down")
    moved = [
        change(tensor) if which in (name, "all") else tensor
        for name, tensor in zip(names, given, strict=True)
    ]
    moved_ids = change(ids) if which in ("ids", "all") else ids
    moved_grad = change(grad) if which in ("grad", "all") else grad
    inputs = [tensor.detach().requires_grad_() for tensor in moved]
    y = moe(inputs[0], routed(moved_ids, inputs[1], 12), *inputs[2:])
    got = [y.detach(), *torch.autograd.grad(y, inputs, moved_grad)]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_weights_may_be_shared_between_layers_and_be_views():
    config = RouterConfig(8, 2, "softmax")
    first, second = (make_layer(config) for _ in range(2))
    # One block of memory holds both weights, transposed; both layers use it.
    block = nn.Parameter(torch.randn(8, 3 * 128, 256, device="cuda").bfloat16() * 256**-0.5)
    x = torch.randn(300, 256, device="cuda").bfloat16()
    gate_up, down = block[:, :256], block[:, 256:].transpose(1, 2)
    routing = [layer.router(x) for layer in (first, second)]
    y = x
    for chosen in routing:
        y = moe(y, chosen, gate_up, down)
    grad = torch.randn_like(y)
    y.backward(grad)
    wide = block.detach().double().requires_grad_()
    true = x.double()
    for chosen in routing:
        given = routed(chosen.ids_TK, chosen.weights_TK.detach().double(), 8)
        true = moe(true, given, wide[:, :256], wide[:, 256:].transpose(1, 2), backend="reference")
    true.backward(grad.double())
    assert relative_error(y, true) < TOLERANCE
    assert relative_error(block.grad, wide.grad) < TOLERANCE


def test_rows_times_expert_width_may_pass_two_to_the_31():
    tokens, top_k, expert_width = 2**18, 8, 544
    assert tokens * top_k * 2 * expert_width > 2**31
    by_parts(tokens, top_k, 64, expert_width)


def test_rows_times_width_may_pass_two_to_the_31():
    tokens, top_k, width = 2**18, 8, 1056
    assert tokens * top_k * width > 2**31
    by_parts(tokens, top_k, width, 32)


def by_parts(tokens, top_k, width, expert_width):
    """All tokens at once against runs of 2**14 of them: the same bits, and sums of gradients."""
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of GPU memory")
    ids, given = draw(tokens, width, expert_width, 16, top_k)
    grad = torch.randn_like(given[0])
    whole = run(ids, given, grad)
    sums = [torch.zeros_like(whole[index], dtype=torch.float64) for index in (3, 4)]
    for at in range(0, tokens, 2**14):
        part = slice(at, at + 2**14)
        piece = (given[0][part], given[1][part], *given[2:])
        got = run(ids[part], piece, grad[part])
        for index in (0, 1, 2):
            assert torch.equal(got[index], whole[index][part])
        for total, index in zip(sums, (3, 4), strict=True):
            total += got[index]
    for total, index in zip(sums, (3, 4), strict=True):
        assert relative_error(whole[index], total) < TOLERANCE


def test_weights_may_hold_more_than_two_to_the_31_values():
    experts, width, expert_width = 128, 4224, 2048
    assert experts * 2 * expert_width * width > 2**31
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    ids, given = draw(256, width, expert_width, experts, 2)
    ids[::2, 1] = experts - 1
    ids[::2, 0] = 5
    grad = torch.randn_like(given[0])
    got = run(ids, given, grad)
    # The last experts alone are far below any limit.
    tail = slice(experts - 8, experts)
    inside = torch.where(ids >= experts - 8, ids - (experts - 8), 8)
    few = (given[0], given[1], given[2][tail].clone(), given[3][tail].clone())
    want = run(inside, few, grad)
    assert torch.equal(got[3][tail], want[3])
    assert torch.equal(got[4][tail], want[4])
    assert want[3][-1].any() and want[4][-1].any()
    only = (inside < 8).all(-1)
    assert torch.equal(got[0][only], want[0][only])


@pytest.mark.parametrize("config", [RouterConfig(16, 4, "softmax"), RouterConfig(64, 6, "sigmoid")])
def test_forward_and_backward_replay_from_a_captured_graph(config):
    layer = make_layer(config)
    x = torch.randn(777, 256, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    inputs = (x, *layer.parameters())

    def step():
        y, routing = layer(x)
        return [y, routing.load_E, *torch.autograd.grad(y, inputs, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, 3.0):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * scale)
            x[5:400] = x[5]  # another load than was captured
        graph.replay()
        want = step()
        assert all(torch.equal(one, other) for one, other in zip(captured, want, strict=True))


def test_forward_without_gradients_keeps_no_pre_activation():
    tokens, width, expert_width = 8192, 512, 2048
    layer = make_layer(RouterConfig(16, 4, "sigmoid"), width, expert_width)
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    h_bytes = tokens * 4 * 2 * expert_width * 2

    def peak(work):
        work()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def without():
        with torch.no_grad():
            layer(x)

    def held():
        y, _ = layer(x)
        return y

    assert peak(held) - peak(without) >= 0.9 * h_bytes
    kept = []
    for recompute in (False, True):
        layer.recompute = recompute
        before = torch.cuda.memory_allocated()
        y, _ = layer(x)
        kept.append(torch.cuda.memory_allocated() - before)
        del y
    assert kept[0] - kept[1] >= 0.9 * h_bytes


def test_a_backward_makes_no_second_pre_activation():
    tokens, width, expert_width = 8192, 512, 2048
    layer = make_layer(RouterConfig(16, 4, "sigmoid"), width, expert_width)
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn_like(x)
    for _ in range(2):  # the first compiles
        y, _ = layer(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(y, inputs, grad)
        torch.cuda.synchronize()
        made = torch.cuda.max_memory_allocated() - before
        del grads
    # The gradient of a is half as large; the rest is small beside it.
    assert made < tokens * 4 * 2 * expert_width * 2


def test_a_layer_trains_under_compile_and_autocast():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(512, 256, device="cuda").bfloat16().requires_grad_()
    inputs, grad = (x, *layer.parameters()), torch.randn(512, 256, device="cuda").bfloat16()
    want = torch.autograd.grad(layer(x)[0], inputs, grad)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = torch.autograd.grad(compiled(x)[0], inputs, grad)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 1e-2


def test_the_router_of_the_layer_is_the_fused_one():
    layer = make_layer(RouterConfig(16, 4, "sigmoid"))
    x = torch.randn(64, 256, device="cuda").bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(x)
        torch.cuda.synchronize()
    kernels = {event.key for event in profile.key_averages()}
    assert any("choose_kernel" in name for name in kernels), kernels
    got, want = layer(x)[1], route(x, layer.router.weight, layer.router.config)
    assert torch.equal(got.ids_TK, want.ids_TK)
