"""Plans of a pipeline end, keep their order, hold little, and wait no longer than their papers say.

The simulation is checked against three counts by hand first, as it judges everything after.
"""

from collections.abc import Iterable

import pytest
from nmoe_train.parallel.schedule import (
    Action,
    Costs,
    Kind,
    PlanError,
    ScheduleName,
    StagePlan,
    forward_plan,
    make_plan,
    simulate,
)

STAGES = [1, 2, 3, 4, 5, 8, 16]
MICRO_BATCHES = [1, 2, 3, 4, 5, 8, 16, 33]
EVERY = [
    *((name, p, m, 1) for name in ("1f1b", "zero-bubble") for p in STAGES for m in MICRO_BATCHES),
    *(("interleaved", p, m * p, c) for p in STAGES for m in (1, 2, 5) for c in (2, 3, 4)),
]
FULL = [case for case in EVERY if case[2] >= case[1]]
"""Those of as many micro-batches as stages at least, for which there are formulas."""
F, B, W = Kind


def plan_of(text: str) -> StagePlan:
    """A stage's plan from words such as "F0 F1 B0"."""
    return [Action(Kind(word[0]), int(word[1:])) for word in text.split()]


def parts(stages: int, chunks: int, *costs: float) -> list[Costs]:
    return [Costs(*costs)] * (stages * chunks)


def test_a_plan_by_hand_takes_the_time_counted_on_paper() -> None:
    plan = [plan_of("F0 F1 B0 B1"), plan_of("F0 B0 F1 B1")]
    found = simulate(plan, parts(2, 1, 1, 1, 1))
    # Stage 0: F0 0-1, F1 1-2, waits, B0 4-6, waits, B1 7-9; stage 1: F0 1-2, B0 2-4, F1, B1 5-7.
    assert (found.span, found.busy, found.in_flight) == (9, [6, 6], [2, 1])
    assert found.bubble == pytest.approx(1 - 12 / 18)
    uneven = simulate(plan, [Costs(2, 2, 2), Costs(1, 1, 1)])
    # Stage 0: F0 0-2, F1 2-4, waits until B0 of stage 1 at 5, B0 5-9, B1 9-13.
    assert (uneven.span, uneven.busy) == (13, [12, 6])
    split = simulate([plan_of("F0 F1 B0 W0 B1 W1"), plan_of("F0 B0 F1 W0 B1 W1")], parts(2, 1))
    # Stage 0: 0-2, B0 3-4, W0, B1 6-7, W1 7-8; stage 1: F0 1-2, B0, F1, W0, B1 5-6, W1.
    assert (split.span, split.busy, split.in_flight) == (8, [6, 6], [2, 2])


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], None),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "waits for ever"),
        (["B0 F0", "F0 B0"], "waits for ever"),
        (["F0 B0", "F0"], "stage 0 waits for ever before"),
        (["F0 F0 B0", "F0 B0"], "twice"),
        (["F0 W0 B0", "F0 B0 W0"], "waits for ever"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan: list[str], says: str | None) -> None:
    costs = parts(2, 1)
    if says is None:
        simulate([plan_of(text) for text in plan], costs)
        return
    with pytest.raises(PlanError, match=says):
        simulate([plan_of(text) for text in plan], costs)


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), EVERY)
def test_every_plan_does_each_piece_of_work_once_in_order_and_ends(
    name: ScheduleName, stages: int, micro_batches: int, chunks: int
) -> None:
    plan = make_plan(name, stages, micro_batches, chunks)
    kinds = [F, B, W] if name == "zero-bubble" else [F, B]
    for actions in plan:
        assert set(actions) == {
            Action(kind, micro, chunk)
            for kind in kinds
            for micro in range(micro_batches)
            for chunk in range(chunks)
        }
        assert len(set(actions)) == len(actions)
        places = {action: place for place, action in enumerate(actions)}
        for action, place in places.items():
            later = kinds[kinds.index(action.kind) + 1 :]
            assert all(places[Action(kind, action.micro, action.chunk)] > place for kind in later)
        for kind in kinds:
            # Gradients add up in the order of micro-batches, as on one process.
            for chunk in range(chunks):
                micros = [a.micro for a in actions if a.kind is kind and a.chunk == chunk]
                assert micros == sorted(micros)
    costs = [Costs(1 + part % 3, 1 + part % 2, 1) for part in range(stages * chunks)]
    assert simulate(plan, costs).span > 0


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), EVERY)
def test_what_a_stage_holds_is_bounded_whatever_the_micro_batches(
    name: ScheduleName, stages: int, micro_batches: int, chunks: int
) -> None:
    found = simulate(make_plan(name, stages, micro_batches, chunks), parts(stages, chunks))
    work = micro_batches * chunks
    bounds: Iterable[int]
    if name == "1f1b":
        bounds = (stages - stage for stage in range(stages))
    elif name == "zero-bubble":
        bounds = (stages for _ in range(stages))
    else:
        bounds = (2 * (stages - s - 1) + (chunks - 1) * stages + 1 for s in range(stages))
    assert found.in_flight == [min(work, bound) for bound in bounds]


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), FULL)
def test_stages_wait_as_long_as_the_papers_say(
    name: ScheduleName, stages: int, micro_batches: int, chunks: int
) -> None:
    plan = make_plan(name, stages, micro_batches, chunks)
    found = simulate(plan, parts(stages, chunks))
    work = 3 * micro_batches * chunks
    # A stage waits P - 1 times for a forward and a backward of one chunk, which take 3 together;
    # zero-bubble fills 2 of them with gradients of weights.
    waits = 1 if name == "zero-bubble" else 3
    assert found.span == work + waits * (stages - 1)


def test_zero_bubble_waits_least_and_interleaved_less_than_1f1b() -> None:
    for stages in (2, 4, 8):
        for micro_batches in (stages, 2 * stages, 4 * stages):
            bubbles = [
                simulate(make_plan("1f1b", stages, micro_batches), parts(stages, 1)).bubble,
                simulate(
                    make_plan("interleaved", stages, micro_batches, 2),
                    parts(stages, 2, 0.5, 0.5, 0.5),
                ).bubble,
                simulate(make_plan("zero-bubble", stages, micro_batches), parts(stages, 1)).bubble,
            ]
            assert bubbles == sorted(bubbles, reverse=True)


@pytest.mark.parametrize("chunks", [1, 3])
def test_forwards_alone_pass_every_part_in_turn(chunks: int) -> None:
    plan = forward_plan(3, 4, chunks)
    assert all(len(actions) == 4 * chunks for actions in plan)
    simulate(plan, parts(3, chunks))
