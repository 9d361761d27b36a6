"""All ranks of a layout in one process: each holds its part of a state, saves it, and loads it.

The groups are real ones over a backend that sends nothing, as a state needs no messages; what ranks
tell each other during a save goes through a real store.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from nmoe_train.checkpoint import (
    gather_state,
    owned_state,
    restore_state,
    state_boxes,
    state_places,
    write_checkpoint,
)
from nmoe_train.config import Config
from nmoe_train.model import Transformer
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.optim import build_optimizer
from nmoe_train.parallel import Layout
from nmoe_train.parallel.fsdp import shard_weights
from nmoe_train.parallel.groups import Groups, make_groups
from nmoe_train.parallel.letters import Letters
from nmoe_train.parallel.pipeline import held_layers, part_layers
from nmoe_train.plan.weights import ExpertOwner
from torch import Tensor
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

VOCABULARY = 257
CPU = torch.device("cpu")
LONG_S = 120.0


class Ranks:
    """Groups of several ranks in one process that have a store and nothing else in common."""

    def __init__(self, layouts: list[Layout]) -> None:
        store = HashStore()
        self.groups = [_Storing(layout, store) for layout in layouts]

    def letters(self, topic: str) -> list[Letters]:
        """What each rank writes and reads in one undertaking."""
        return [Letters(groups, topic) for groups in self.groups]


class _Storing(Groups):
    """Waits for others without collectives, which need a process each."""

    def all_say(self, yes: bool) -> bool:
        return yes


@dataclass
class Part:
    """One rank's model and optimizer."""

    layout: Layout
    model: Transformer
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Tensor]:
        """What the rank holds, by name."""
        return gather_state(self.model, self.optimizer)


@contextmanager
def part(config: Config, layout: Layout) -> Iterator[Part]:
    """A rank's part of a training, with numbers of nobody's."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=layout.rank, world_size=max(2, layout.ranks)
    )
    try:
        made = make_groups(layout, CPU) if layout.ranks > 1 else {}
        parts = part_layers(config, VOCABULARY, layout.pp)
        experts = layout.local_experts(config.model.moe.experts)
        model = Transformer(
            config.model,
            VOCABULARY,
            expert_parallel=ExpertOwner(experts),  # type: ignore[arg-type]  # all it asks
            held=held_layers(parts, layout.pp_rank, layout.pp),
            tensor=TensorParallel(made.get("tensor")),
        )
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        if config.parallel.fsdp:
            shard_weights(model, Groups(layout, HashStore(), **made), CPU)
        yield Part(layout, model, build_optimizer(model, config.optimizer))
    finally:
        dist.destroy_process_group()


def ranks_of(layout: Layout) -> list[Layout]:
    """The layout as each rank has it."""
    return [replace(layout, rank=rank) for rank in range(layout.ranks)]


def move(
    config: Config,
    layout: Layout,
    saved: Any,
    root: Path,
    step: int,
    meta: dict[str, Any],
    look: Callable[[Part], None],
) -> None:
    """Every rank of a layout takes its part of `saved`, is looked at, and saves it below `root`."""
    owned: list[tuple[dict[str, Tensor], Any]] = []
    for place in ranks_of(layout):
        with part(config, place) as here:
            restore_state(here.model, here.optimizer, saved, step)
            look(here)
            mine = owned_state(here.state(), place, state_places(here.model), here.model.copies)
            copies = {name: tensor.clone() for name, tensor in mine.items()}
            owned.append((copies, state_boxes(here.model)))
    letters = Ranks(ranks_of(layout)).letters("save")
    problems: list[Exception] = []

    def one(rank: int) -> None:
        tensors, boxes = owned[rank]
        try:
            write_checkpoint(root, step, tensors, meta, keep=1, groups=letters[rank], boxes=boxes)
        except Exception as error:
            problems.append(error)

    threads = [Thread(target=one, args=(rank,), daemon=True) for rank in range(layout.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert problems == []
