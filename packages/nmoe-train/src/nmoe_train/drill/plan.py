"""What happens in a drill, and when: a function of the seed alone.

A fault comes at a random moment after a random step, so that it may hit a step, a snapshot, a
checkpoint, a recovery from the one before, or a worker that is coming back.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["kill", "stop", "slow-disk", "full-disk", "slow-peer", "partition"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FIRST_STEP = 4
GAP_STEPS = (3, 9)
DELAY_S = 0.6
TAIL_STEPS = 20
"""Steps after the last fault: time to do it, to recover, and to see that training goes on."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a kind, `delay_s` seconds after step `step` is done, to the workers `slots`."""

    kind: Kind
    step: int
    delay_s: float
    slots: tuple[int, ...]
    cuts_store: bool = False
    """partition: whether the smaller side loses the store too."""


@dataclass(frozen=True)
class Plan:
    """All faults of a drill in order, and how many steps its training has."""

    faults: tuple[PlannedFault, ...]
    steps: int


def plan_faults(kinds: Sequence[Kind], count: int, workers: int, seed: int) -> Plan:
    """Draws `count` faults; with at least as many as kinds, each kind comes."""
    draw = random.Random(f"drill/{seed}")
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(chosen)
    faults, step = [], FIRST_STEP
    for kind in chosen:
        most = max(1, workers // 2) if kind == "partition" else 1
        slots = draw.sample(range(workers), draw.randint(1, most))
        delay_s, cuts_store = draw.uniform(0, DELAY_S), draw.random() < 0.5
        faults.append(PlannedFault(kind, step, delay_s, tuple(sorted(slots)), cuts_store))
        step += draw.randint(*GAP_STEPS)
    last = faults[-1].step if faults else 0
    return Plan(tuple(faults), last + TAIL_STEPS)
