"""Weights sharded over replicas: sums of gradients, the norm and every part are one process's.

Three ranks share what three does not divide: 41 tokens of the vocabulary, 4 experts, widths of 50
and 17.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nmoe_train.checkpoint import gather_state, owned_state, state_places
from nmoe_train.config import Config
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.tensor import local
from nmoe_train.optim import build_optimizer, clip_gradients
from nmoe_train.parallel import Layout
from nmoe_train.parallel.fsdp import free_gathered, last_backward, shard_weights
from nmoe_train.parallel.groups import Groups, make_groups
from nmoe_train.parallel.reduction import StepSums, reduce_step
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

Tiny = Callable[..., Config]
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
RANKS, MICRO_BATCHES, VOCABULARY = 3, 2, 41
CPU = torch.device("cpu")


@pytest.fixture
def config(tiny: Tiny) -> Config:
    return tiny(
        **{
            "model.width": 36,
            "model.dense_width": 50,
            "model.moe.expert_width": 17,
            "model.attention.q_lora_rank": 10,
            "model.init_std": 0.3,
        }
    )


def build(config: Config, dtype: torch.dtype) -> Transformer:
    model = Transformer(config.model, VOCABULARY, dtype=dtype)
    initialise(model, config.model, seed=3)
    return model


def backward(model: Transformer, share: int) -> None:
    """Adds the gradients of a rank's micro-batches, which are its part of a mean over all."""
    for micro in range(MICRO_BATCHES):
        first = share * MICRO_BATCHES + micro
        inputs = torch.arange(first, first + 14).view(2, 7) * 5 % VOCABULARY
        output = model.hidden(inputs, torch.zeros_like(inputs))
        balance = torch.stack([report.balance_loss for report in output.routing.values()]).sum()
        ce = model.loss(output.hidden_BSH, inputs.roll(-1, 1), 8)
        last_backward(model, micro == MICRO_BATCHES - 1)
        (ce / (14 * MICRO_BATCHES * RANKS) + 0.3 * balance).backward()


def sharded(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Groups]:
    layout = Layout(dp=RANKS, rank=dist.get_rank())
    groups = Groups(layout, _get_default_store(), **make_groups(layout, CPU))
    model = build(config, dtype)
    shard_weights(model, groups, CPU)
    return model, groups


def one_process(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
    model = build(config, dtype)
    for share in range(RANKS):
        backward(model, share)
    return model


def parts_add_up(parts: list[dict[str, tuple[Tensor, Any]]], whole: dict[str, Tensor]) -> float:
    """The largest relative difference; every number stands in exactly one rank's part."""
    worst = 0.0
    for name, wanted in whole.items():
        found = torch.full_like(wanted, torch.nan)
        for part in parts:
            if name in part:
                tensor, box = part[name]
                here = found if box is None else box.of(found)
                assert here.isnan().all(), f"{name} is there twice"
                here.copy_(tensor)
        assert not found.isnan().any(), f"nobody has all of {name}"
        worst = max(worst, float((found - wanted).norm() / wanted.norm().clamp_min(1e-9)))
    return worst


def owned(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, Any]]:
    places = state_places(model)
    layout = Layout(dp=RANKS, rank=dist.get_rank())
    mine = owned_state(gather_state(model, optimizer), layout, places)
    return {
        name: (tensor.clone(), places[name].box if name in places else None)
        for name, tensor in mine.items()
    }


def test_a_sharded_step_is_that_of_one_process(config: Config, on_ranks: OnRanks) -> None:
    single = one_process(config)
    optimizer = build_optimizer(single, config.optimizer)
    norm = clip_gradients(single.parameters(), 0.1)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()

    def on_rank() -> tuple[float, int, Any]:
        model, groups = sharded(config)
        optimizer = build_optimizer(model, config.optimizer)
        backward(model, groups.layout.rank)
        _, norm = reduce_step(model, StepSums({}, {}), groups)
        clip_gradients(model.parameters(), 0.1, norm)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        held = sum(local(parameter).numel() for parameter in model.parameters())
        return float(norm), held, owned(model, optimizer)

    results = on_ranks(RANKS, on_rank)
    for got, held, _ in results:
        assert got == pytest.approx(float(norm), rel=1e-5)
        assert held < 0.45 * sum(parameter.numel() for parameter in single.parameters())
    assert parts_add_up([part for *_, part in results], gather_state(single, optimizer)) < 1e-5


def test_norms_and_routers_stay_whole_and_in_fp32(config: Config, on_ranks: OnRanks) -> None:
    def on_rank() -> list[tuple[str, bool, torch.dtype]]:
        model, _ = sharded(config, torch.bfloat16)
        assert not [block for block in model.moe_blocks().values() if block.overlaps]
        backward(model, dist.get_rank())
        return [
            (name, isinstance(p, DTensor), p.grad.dtype if p.grad is not None else torch.int8)
            for name, p in model.named_parameters()
        ]

    for result in on_ranks(RANKS, on_rank):
        for name, cut, dtype in result:
            assert cut != ("norm" in name or ".router." in name), name
            assert dtype == torch.float32, name


def test_in_bf16_gradients_are_summed_in_fp32(config: Config, on_ranks: OnRanks) -> None:
    single = {name: p.grad for name, p in one_process(config, torch.bfloat16).named_parameters()}

    def on_rank() -> Any:
        model, groups = sharded(config, torch.bfloat16)
        backward(model, groups.layout.rank)
        reduce_step(model, StepSums({}, {}), groups)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                local(parameter).copy_(local(parameter.grad))
        return owned(model, torch.optim.SGD(model.parameters()))

    model = build(config, torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(single[name])
    whole = gather_state(model, torch.optim.SGD(model.parameters()))
    # Products round to bf16 once more where weights are bf16 as they come: half of 2^-7 each.
    assert parts_add_up(on_ranks(RANKS, on_rank), whole) < 1e-2


def test_after_a_forward_without_backward_weights_are_in_parts_again(
    config: Config, on_ranks: OnRanks
) -> None:
    def on_rank() -> bool:
        model, _ = sharded(config)
        tokens = torch.arange(5)[None]
        with torch.no_grad():
            model.logits(tokens, torch.zeros_like(tokens))
        gathered = not isinstance(model.output_weight, DTensor)
        free_gathered(model)
        return gathered and isinstance(model.output_weight, DTensor)

    assert on_ranks(RANKS, on_rank) == [True] * RANKS


def test_users_are_not_warned_of_what_nobody_does(config: Config, on_ranks: OnRanks) -> None:
    def on_rank() -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            model, _ = sharded(config)
            backward(model, dist.get_rank())
        return [str(warning.message) for warning in told]

    assert on_ranks(RANKS, on_rank) == [[]] * RANKS
