"""Muon: every hidden matrix, and no part or stack of them, moves by its own orthogonal momentum.

The reference does the sums of the paper in float64, matrix by matrix, on slices listed by hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import nmoe_train.parallel.matrices as shared_matrices
import pytest
import torch
from nmoe_train.checkpoint import gather_state, state_boxes
from nmoe_train.config import Config
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.box import Box
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import hidden_weights
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.optim import build_optimizer
from nmoe_train.optim.muon import Muon, orthogonalise
from nmoe_train.parallel import Layout
from nmoe_train.parallel.fsdp import shard_weights
from nmoe_train.parallel.groups import Groups, make_groups
from nmoe_train.parallel.matrices import SharedMatrices
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, distribute_tensor

Tiny = Callable[..., Config]
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
CPU = torch.device("cpu")
VOCABULARY, RATE, DECAY, STEPS = 41, 0.02, 0.1, 2
MODELS: dict[str, dict[str, Any]] = {
    "mla": {"model.attention.q_lora_rank": 10},
    "gqa": {
        "model.heads": 4,
        "model.attention.kind": "gqa",
        "model.attention.kv_heads": 2,
        "model.attention.head_dim": 6,
    },
}


@pytest.fixture
def config(tiny: Tiny) -> Callable[..., Config]:
    """The configuration of a model in which nothing divides by two or three."""
    return lambda kind, **overrides: tiny(
        **{
            "model.dense_width": 50,
            "model.width": 36,
            "model.moe.expert_width": 17,
            "optimizer.name": "muon",
            "optimizer.lr": RATE,
            "optimizer.weight_decay": DECAY,
            **MODELS[kind],
            **overrides,
        }
    )


def build(
    config: Config, tensor: TensorParallel | None = None, split: TensorParallel | None = None
) -> Transformer:
    model = Transformer(
        config.model,
        VOCABULARY,
        tensor=tensor or TensorParallel(),
        expert_tensor=split or TensorParallel(),
    )
    initialise(model, config.model, seed=3)
    return model


def gradient(number: int, step: int, shape: torch.Size) -> Tensor:
    """The gradient of a whole weight, unlike that of any other and of any other step."""
    generator = torch.Generator().manual_seed(100 * number + step)
    return torch.randn(shape, generator=generator)


def matrices(name: str, weight: Tensor) -> Iterator[Tensor]:
    """The matrices of a whole hidden weight, by the equations of DeepSeek-V2 and of GQA."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last == "gate_up":
        for expert in weight:
            yield from (expert[:17], expert[17:])
    elif name.endswith("experts.down"):
        yield from weight
    elif last == "q_up":
        for head in (weight[:12], weight[12:]):
            yield from (head[:8], head[8:])
    elif last == "kv_down":
        yield from (weight[:12], weight[12:])
    elif last == "kv_up":
        for head in (weight[:16], weight[16:]):
            yield from (head[:8], head[8:])
    elif last == "output" and weight.shape[1] == 16:
        yield from (weight[:, :8], weight[:, 8:])
    elif last == "output":
        yield from (weight[:, first : first + 6] for first in range(0, 24, 6))
    elif last in ("query", "key", "value"):
        yield from (weight[first : first + 6] for first in range(0, len(weight), 6))
    else:
        assert last in ("gate", "up", "down", "q_down"), name
        yield weight


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of X (a + b X^T X + c (X^T X)^2), in float64."""
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x.T @ x
        x = 3.4445 * x - 4.775 * x @ square + 2.0315 * x @ square @ square
    return x


def expected(model: Transformer) -> dict[str, Tensor]:
    """Hidden weights after the steps, by name."""
    found = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name or "router" in name or "embedding" in name or "head" in name:
            continue
        weight = parameter.detach().double()
        mean = torch.zeros_like(weight)
        for step in range(STEPS):
            grad = gradient(number, step, parameter.shape).double()
            mean = 0.95 * mean + 0.05 * grad
            update = 0.95 * mean + 0.05 * grad
            weight = weight * (1 - RATE * DECAY)
            for part, its in zip(matrices(name, weight), matrices(name, update), strict=True):
                part -= RATE * 0.2 * max(its.shape) ** 0.5 * orthogonal(its)
        found[name] = weight
    return found


def step_all(model: Transformer, optimizer: Any, part: Callable[[str, Tensor], Tensor]) -> None:
    """Makes the steps; `part` gives what of a whole gradient is here."""
    for step in range(STEPS):
        for number, (name, parameter) in enumerate(model.named_parameters()):
            cut = model.cuts().get(name)
            shape = list(parameter.shape)
            if cut is not None:
                shape[cut.dim] = cut.whole
            if model.expert_cut is not None and STACKED_EXPERTS.search(name):
                dim = shape.index(model.expert_cut.length * (2 if "gate_up" in name else 1), 1)
                shape[dim] *= model.expert_cut.whole // model.expert_cut.length
            parameter.grad = part(name, gradient(number, step, torch.Size(shape)))
        optimizer.found_inf = torch.zeros(())
        optimizer.step()


def difference(got: Tensor, want: Tensor) -> float:
    apart, size = (got.detach().double() - want.double()).norm(), want.double().norm()
    return float((apart / size.clamp_min(1e-12)).detach())


@pytest.mark.parametrize("kind", MODELS)
def test_every_expert_projection_and_head_moves_as_a_matrix_of_its_own(
    config: Callable[..., Config], kind: str
) -> None:
    model = build(config(kind))
    want = expected(model)
    optimizer = build_optimizer(model, config(kind).optimizer)
    step_all(model, optimizer, lambda _, grad: grad)
    weights = dict(model.named_parameters())
    assert want.keys() == hidden_weights(model).keys()
    for name, weight in want.items():
        assert difference(weights[name], weight) < 1e-6, name
        assert set(optimizer.state[weights[name]]) == {"momentum_buffer"}
    for name in weights.keys() - want.keys():
        assert set(optimizer.state[weights[name]]) == {"step", "exp_avg", "exp_avg_sq"}, name


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_single_matrix_moves_as_torchs_muon_moves_it(shape: tuple[int, int]) -> None:
    mine, its = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))

    def on_matrices(parts: Any, function: Callable[[Tensor], Tensor]) -> None:
        parts["a"].copy_(function(parts["a"][None])[0])

    group = {"params": [mine], "lr": RATE, "weight_decay": DECAY, "momentum": 0.95}
    muon = Muon([group], {"a": mine}, on_matrices)
    options: dict[str, Any] = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    torchs = torch.optim.Muon([its], lr=RATE, **options)
    for step in range(3):
        mine.grad = gradient(0, step, mine.shape)
        its.grad = mine.grad.clone()
        muon.step()
        torchs.step()
    # torch's products are in bf16, of 8 bits.
    assert difference(mine, its) < 2e-2


def test_singular_values_come_near_one_whatever_they_were() -> None:
    left, right = (torch.linalg.qr(gradient(0, n, torch.Size((8, 8))))[0] for n in range(2))
    values = torch.logspace(-2, 3, 8)
    stack = torch.stack([left @ values.diag() @ right, torch.zeros(8, 8)])
    found = torch.linalg.svdvals(orthogonalise(stack))
    # Those within 1e-3 of the largest; smaller ones have not come as far in five steps.
    assert found[0, :5].min() > 0.6 and found[0].max() < 1.25
    assert not found[1].any()


def on_layout(config: Config, layout: Layout, fsdp: bool) -> tuple[Transformer, Any, list[int]]:
    """This rank's part of a model, after the steps, and how many matrices it was given a step."""
    groups = Groups(layout, _get_default_store(), **make_groups(layout, CPU))
    model = build(config, TensorParallel(groups.tensor), TensorParallel(groups.expert_tensor))
    if fsdp:
        shard_weights(model, groups, CPU)
    matrices = SharedMatrices(model, groups)
    seen: list[int] = []

    def counted(parts: Any, function: Callable[[Tensor], Tensor]) -> None:
        seen.append(0)

        def count(stack: Tensor) -> Tensor:
            seen[-1] += len(stack)
            return function(stack)

        matrices(parts, count)

    optimizer = build_optimizer(model, config.optimizer, counted)
    weights, cuts = dict(model.named_parameters()), model.cuts()

    def part(name: str, grad: Tensor) -> Tensor:
        here = cuts[name].of(grad) if name in cuts else grad
        if model.expert_cut is not None and STACKED_EXPERTS.search(name):
            apart = grad.unflatten(1, (2, -1)) if "gate_up" in name else grad
            width = replace(model.expert_cut, dim=2).of(apart)
            here = width.flatten(1, 2) if "gate_up" in name else width
        weight = weights[name]
        if isinstance(weight, DTensor):
            return distribute_tensor(here.contiguous(), weight.device_mesh, weight.placements)
        return here.contiguous()

    step_all(model, optimizer, part)
    return model, optimizer, seen


@pytest.mark.parametrize("rounds", [1 << 24, 100])
@pytest.mark.parametrize(
    ("kind", "dp", "tp", "etp", "fsdp"),
    [
        ("mla", 3, 1, 1, False),
        ("mla", 3, 1, 1, True),
        ("gqa", 2, 2, 1, True),
        ("gqa", 1, 2, 1, False),
        ("gqa", 2, 2, 2, True),
        ("gqa", 1, 2, 2, False),
    ],
)
def test_parts_and_copies_on_ranks_move_as_the_whole_matrices_do(
    config: Callable[..., Config],
    on_ranks: OnRanks,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dp: int,
    tp: int,
    etp: int,
    fsdp: bool,
    rounds: int,
) -> None:
    monkeypatch.setattr(shared_matrices, "ROUND_NUMBERS", rounds)
    sets = config(kind, **{"model.moe.expert_width": 18 if etp > 1 else 17})
    one = build(sets)
    alone = build_optimizer(one, sets.optimizer)
    step_all(one, alone, lambda _, grad: grad)
    want = gather_state(one, alone)

    def on_rank() -> Any:
        layout = Layout(dp=dp, tp=tp, etp=etp, rank=dist.get_rank())
        model, optimizer, seen = on_layout(sets, layout, fsdp)
        state, boxes = gather_state(model, optimizer), state_boxes(model)
        parts = {name: (tensor.clone(), boxes.get(name)) for name, tensor in state.items()}
        return parts, seen

    results = on_ranks(dp * tp, on_rank)
    total = sum(len(weight.matrices) for weight in hidden_weights(one).values())
    assert [sum(counts) for counts in zip(*(seen for _, seen in results), strict=True)] == (
        [total] * STEPS
    ), "each matrix is worked on once"
    for parts, _ in results:
        assert parts.keys() <= want.keys()
        for name, (tensor, box) in parts.items():
            whole = want[name] if box is None else box.of(want[name])
            if tensor.numel():
                assert difference(tensor, whole) < 1e-5, name


def test_copies_of_a_matrix_stay_alike_to_the_bit(
    config: Callable[..., Config], on_ranks: OnRanks
) -> None:
    def on_rank() -> dict[str, Tensor]:
        model, _, _ = on_layout(config("mla"), Layout(dp=2, rank=dist.get_rank()), False)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    first, second = on_ranks(2, on_rank)
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_momentum(
    config: Callable[..., Config],
) -> None:
    model = build(config("mla"))
    optimizer = build_optimizer(model, config("mla").optimizer)
    step_all(model, optimizer, lambda _, grad: grad)
    before = {name: tensor.clone() for name, tensor in gather_state(model, optimizer).items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = gather_state(model, optimizer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_rates_and_decay_are_those_of_each_group(config: Callable[..., Config]) -> None:
    model = build(config("mla"))
    options = config("mla").optimizer.model_copy(update={"lr_expert": 0.5, "lr_router": 0.25})
    optimizer = build_optimizer(model, options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            kind = "router" if ".router." in name else "dense"
            kind = "expert" if ".experts." in name and kind == "dense" else kind
            assert (group["name"], group["lr"]) == (
                kind,
                {"dense": RATE, "router": 0.25, "expert": 0.5}[kind],
            )
            hidden = name in hidden_weights(model)
            assert ("momentum" in group) == hidden, name
            assert group["weight_decay"] == (DECAY if hidden or name == "head.weight" else 0.0)


def test_parts_of_a_matrix_come_from_the_nearest_ranks_that_have_them() -> None:
    halves = [Box((0, column), (4, 3), (4, 6)) for column in (0, 3)]
    held = {rank: halves[rank % 2] for rank in range(8)}
    for owner in range(8):
        matrix = shared_matrices._Shared(("a", (0, 0)), held, owner)
        # Its neighbour of the same share, and no other replica.
        near = owner + 1 if owner == 0 else owner - 1
        assert matrix.givers == {owner: halves[owner % 2], near: halves[near % 2]}
