"""The learning rate over tokens, against values worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from nmoe_train.config import Config
from nmoe_train.optim import rate_factor


def factors(config: Config) -> list[float]:
    """The factor of every step of a run."""
    return [
        rate_factor(config, step * config.tokens_per_step)
        for step in range(1, config.train.steps + 1)
    ]


@pytest.fixture
def schedule(tiny: Callable[..., Config]) -> Callable[..., Config]:
    """A run of ten steps of 64 tokens, 640 in all."""

    def make(**keys: Any) -> Config:
        overrides = {f"schedule.{key}": value for key, value in keys.items()}
        return tiny(**{"train.steps": 10, **overrides})

    return make


def test_wsd_by_share_of_the_run(schedule: Callable[..., Config]) -> None:
    config = schedule(kind="wsd", warmup=0.4, decay=0.3)
    # Warm-up over 256 tokens, decay over the last 192: after 64, 128, ... tokens.
    wanted = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4]
    assert factors(config) == pytest.approx(wanted)


def test_wsd_in_tokens_with_a_floor(schedule: Callable[..., Config]) -> None:
    config = schedule(kind="wsd", warmup=128.0, decay=256.0, floor=0.5)
    wanted = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6]
    assert factors(config) == pytest.approx(wanted)


def test_cosine(schedule: Callable[..., Config]) -> None:
    config = schedule(kind="cosine", warmup=0.2, floor=0.1)
    # Warm-up over two steps; nine points from 1 down, the last a ninth above the floor.
    curve = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 9)) / 2 for k in range(9)]
    assert factors(config) == pytest.approx([0.5, *curve])


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.01, 1.0, 0.5, 320.0])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_it_rises_then_falls_between_the_floor_and_one(
    schedule: Callable[..., Config], kind: str, warmup: float, floor: float
) -> None:
    config = schedule(kind=kind, warmup=warmup, decay=0.4, floor=floor)
    values = factors(config)
    assert values[0] > 0, "the first step moves"
    peak = values.index(max(values))
    assert max(values) <= 1.0
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert min(values[peak:]) >= floor
    # The last step is one step's share above the floor, so that it moves.
    share = 64 / (256 + 64)
    if kind == "cosine":
        # Warm-ups of 0 %, 1 % and half of the run, of one token and of 320.
        ramp = 640 - {0.0: 0, 0.01: 6, 1.0: 1, 0.5: 320, 320.0: 320}[warmup]
        share = (1 - math.cos(math.pi * 64 / (ramp + 64))) / 2
    assert values[-1] == pytest.approx(floor + (1 - floor) * share)
    assert values[-1] > 0


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_beyond_the_end_it_stays_where_it_ended(schedule: Callable[..., Config], kind: str) -> None:
    config = schedule(kind=kind, floor=0.1)
    end = rate_factor(config, 640)
    assert [rate_factor(config, tokens) for tokens in (641, 704, 10**9)] == [end] * 3
    assert end >= 0.1


def test_without_ramps_wsd_is_constant(schedule: Callable[..., Config]) -> None:
    assert factors(schedule(kind="wsd", warmup=0.0, decay=0.0)) == [1.0] * 10
