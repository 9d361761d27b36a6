"""Experts whose width neighbours split: losses, gradients and parts are those of the whole.

Four ranks share sequences, and neighbours two and two share experts, so that two ranks hold the
same part of each expert.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nmoe_kernels.rdep import ExpertParallel
from nmoe_train.checkpoint import gather_state, owned_state, state_boxes, state_places
from nmoe_train.config import Config
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.parallel import Layout
from nmoe_train.parallel.experts import exchange_record
from nmoe_train.parallel.groups import Groups, make_groups
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Tiny = Callable[..., Config]
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
TP, ETP, VOCABULARY = 4, 2, 41


@pytest.fixture
def config(tiny: Tiny) -> Config:
    return tiny(
        **{
            "model.width": 36,
            "model.heads": 4,
            "model.dense_width": 50,
            "model.moe.expert_width": 10,
            "model.init_std": 0.3,
        }
    )


def build(config: Config, tensor: TensorParallel, split: TensorParallel) -> Transformer:
    model = Transformer(config.model, VOCABULARY, tensor=tensor, expert_tensor=split)
    initialise(model, config.model, seed=3)
    return model


def on_layout(config: Config) -> tuple[Layout, Transformer]:
    layout = Layout(tp=TP, etp=ETP, rank=dist.get_rank())
    groups = make_groups(layout, torch.device("cpu"))
    tensor, split = (TensorParallel(groups[name]) for name in ("tensor", "expert_tensor"))
    return layout, build(config, tensor, split)


def numbers(model: Transformer, positions: int) -> tuple[Tensor, Tensor]:
    """Losses of a model and its loads, after a backward, on two sequences."""
    inputs = torch.arange(2 * positions).view(2, positions) * 5 % VOCABULARY
    output = model.hidden(inputs, (torch.arange(positions) > 3).long().expand(2, -1))
    reports = output.routing.values()
    balance = torch.stack([report.balance_loss for report in reports]).sum()
    z = torch.stack([report.z_loss for report in reports]).sum()
    ce = model.loss(output.hidden_BSH, inputs.roll(-1, 1), 8)
    (ce / 13 + 0.3 * balance + 0.2 * z).backward()
    return torch.stack([ce, balance, z]).detach(), torch.stack([r.load_E for r in reports])


def gradients(model: Transformer) -> dict[str, Tensor]:
    """Gradients under the names of weights, experts one by one."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return gather_state(model, torch.optim.SGD(model.parameters()))


# With two positions, two of the ranks that share sequences have none.
@pytest.mark.parametrize("positions", [7, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_every_gradient_are_those_of_one_process(
    config: Config, on_ranks: OnRanks, positions: int, recompute: bool
) -> None:
    single = build(config, TensorParallel(), TensorParallel())
    losses, loads = numbers(single, positions)
    want = gradients(single)

    def on_rank() -> Any:
        _, model = on_layout(config)
        model.recompute = recompute
        result = numbers(model, positions)
        boxes = state_boxes(model)
        return result, {n: (t, boxes.get(n)) for n, t in gradients(model).items()}, model.cuts()

    results = on_ranks(TP, on_rank)
    torch.testing.assert_close(sum(r[0][0] for r in results), losses, rtol=1e-5, atol=0)
    assert torch.equal(sum(r[0][1] for r in results), loads)
    for rank, (_, parts, cuts) in enumerate(results):
        for name, (grad, box) in parts.items():
            if name.endswith("bias"):
                continue
            # Who holds the same has a part of its gradient, but for what is cut over all.
            same = [rank % ETP, rank % ETP + ETP] if ".experts." in name else range(TP)
            same = range(TP) if ".router." in name else same
            same = [rank] if name.removeprefix("model.") in cuts else same
            mine = sum(results[other][1][name][0] for other in same)
            whole = want[name] if box is None else box.of(want[name])
            difference = float((mine - whole).norm() / whole.norm().clamp_min(1e-9))
            assert difference < 1e-5, name
            assert grad.shape == whole.shape


def test_each_rank_starts_with_its_part_and_all_parts_are_written_once(
    config: Config, on_ranks: OnRanks
) -> None:
    single = build(config, TensorParallel(), TensorParallel())
    whole = gather_state(single, torch.optim.SGD(single.parameters()))

    def on_rank() -> Any:
        layout, model = on_layout(config)
        state = gather_state(model, torch.optim.SGD(model.parameters()))
        places = state_places(model)
        stacks = {n: p.shape for n, p in model.named_parameters() if STACKED_EXPERTS.search(n)}
        written = owned_state(state, layout, places)
        boxes = state_boxes(model)
        return stacks, {name: (tensor.clone(), boxes.get(name)) for name, tensor in written.items()}

    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for stacks, written in on_ranks(TP, on_rank):
        assert stacks == {
            "layers.1.moe.experts.gate_up": (4, 10, 36),
            "layers.1.moe.experts.down": (4, 36, 5),
        }
        for name, (tensor, box) in written.items():
            here = found[name] if box is None else box.of(found[name])
            assert here.isnan().all(), f"{name} is written twice"
            here.copy_(tensor)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert whole["model.layers.1.moe.experts.3.gate_up"].shape == (2, 10, 36)


def test_an_assignment_that_reaches_no_expert_counts_once(
    config: Config, on_ranks: OnRanks
) -> None:
    def on_rank() -> tuple[float, int]:
        layout = Layout(tp=TP, ep=2, etp=ETP, rank=dist.get_rank())
        groups = Groups(layout, _get_default_store(), **make_groups(layout, torch.device("cpu")))
        sizes = {"experts": 4, "width": 36, "slots": 2, "tokens_max": 8}
        with ExpertParallel(groups.expert, **sizes, dtype=torch.float32, device="cpu") as experts:
            model = Transformer(
                config.model,
                VOCABULARY,
                tensor=TensorParallel(groups.tensor),
                expert_tensor=TensorParallel(groups.expert_tensor),
                expert_parallel=experts,
            )
            initialise(model, config.model, seed=3)
            x_BsH = torch.randn(1, 2, 36)
            if layout.rank == 1:
                x_BsH[0, 0] = torch.nan
            with torch.no_grad():
                _, report = model.moe_blocks()[1](x_BsH, 2 * TP)
            record = exchange_record(experts.counters(), groups)
        return record["router/dropped"], int(report.invalid)

    # One token, of two experts.
    assert on_ranks(TP, on_rank) == [(2, 0), (2, 1), (2, 0), (2, 0)]
