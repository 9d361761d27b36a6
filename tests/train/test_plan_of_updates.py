"""What a dry run says of an optimizer's step, against what real ranks take and send in one."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import nmoe_train.parallel.matrices as shared_matrices
import pytest
import torch
from nmoe_train.config import Config
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.tensor import TensorParallel, local
from nmoe_train.optim import build_optimizer
from nmoe_train.parallel import Layout
from nmoe_train.parallel.fsdp import shard_weights
from nmoe_train.parallel.groups import Groups, make_groups
from nmoe_train.parallel.matrices import SharedMatrices
from nmoe_train.plan import dry_run
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.profiler import ProfilerActivity, profile

Tiny = Callable[..., Config]
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
CPU = torch.device("cpu")
VOCABULARY, LIMIT_S = 257, 60.0


def exchange(sent: list[int], rank: int) -> Callable[..., None]:
    """all_to_all_single, which notes what goes to others and leaves nothing behind it.

    Threads of gloo let go of a message a little later than it is said to be there.
    """
    real = dist.all_to_all_single

    def call(out: Tensor, given: Tensor, *sizes: list[int], group: dist.ProcessGroup) -> None:
        uses = [tensor._use_count() for tensor in (out, given)]
        real(out, given, *sizes, group=group)
        sent.append((given.numel() - sizes[1][rank]) * given.itemsize)
        ends = time.monotonic() + LIMIT_S
        while [tensor._use_count() for tensor in (out, given)] != uses:
            assert time.monotonic() < ends, "gloo keeps a message"
            time.sleep(0.001)

    return call


def peak_bytes(work: Callable[[], None]) -> int:
    """The most memory that a piece of work takes at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def on_layout(config: Config, layout: Layout) -> tuple[Transformer, torch.optim.Optimizer]:
    groups = Groups(layout, _get_default_store(), **make_groups(layout, CPU))
    tensor, split = TensorParallel(groups.tensor), TensorParallel(groups.expert_tensor)
    model = Transformer(config.model, VOCABULARY, tensor=tensor, expert_tensor=split)
    initialise(model, config.model, seed=3)
    if config.parallel.fsdp:
        shard_weights(model, groups, CPU)
    return model, build_optimizer(model, config.optimizer, SharedMatrices(model, groups))


# Of two matrices or so a rank, rounds are not as even as those of many.
@pytest.mark.parametrize(("rounds", "tolerance"), [(1 << 24, 0.05), (20_000, 0.4)])
@pytest.mark.parametrize(
    ("layout", "fsdp"),
    [
        (Layout(dp=2), False),
        (Layout(dp=2), True),
        (Layout(dp=3), True),
        (Layout(dp=2, tp=2), False),
        (Layout(tp=2, etp=2), True),
    ],
    ids=str,
)
def test_a_step_of_muon_takes_and_sends_what_is_foreseen(
    tiny: Tiny,
    on_ranks: OnRanks,
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    fsdp: bool,
    rounds: int,
    tolerance: float,
) -> None:
    config = tiny(
        **{
            "model.width": 96,
            "model.layers": 4,
            "model.dense_width": 200,
            "model.moe.expert_width": 40,
            "optimizer.name": "muon",
            "parallel.fsdp": fsdp,
            "train.batch_size": 6,
        }
    )
    monkeypatch.setattr(shared_matrices, "ROUND_NUMBERS", rounds)
    monkeypatch.setattr("nmoe_train.plan.matrices.ROUND_NUMBERS", rounds)

    def on_rank() -> tuple[int, ...]:
        model, optimizer = on_layout(config, replace(layout, rank=dist.get_rank()))
        sent: list[int] = []
        noted = exchange(sent, dist.get_rank())
        monkeypatch.setattr(shared_matrices.dist, "all_to_all_single", noted)
        peak = 0
        # The moments come in the first step, and stay.
        for _ in range(2):
            sent.clear()
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            peak = peak_bytes(optimizer.step)
        state = [
            local(moment).nbytes
            for moments in optimizer.state.values()
            for name, moment in moments.items()
            if name != "step"
        ]
        weights = sum(local(parameter).nbytes for parameter in model.parameters())
        return weights, sum(state), peak, sum(sent)

    found = on_ranks(layout.ranks, on_rank)
    (stage,) = dry_run(config, layout, VOCABULARY).stages
    weights, moments, peak, sent = (sum(each) / len(found) for each in zip(*found, strict=True))
    # Rows that do not divide make ranks uneven, and the dry run's is that with the most.
    assert stage.memory["weights"] == pytest.approx(weights, rel=0.01)
    assert stage.memory["moments"] == pytest.approx(moments, rel=0.01)
    kept = 2 * stage.memory["weights"] + stage.memory["moments"]
    assert stage.update - kept == pytest.approx(peak, rel=tolerance)
    assert stage.sent["matrices"] == pytest.approx(sent, rel=0.02)
