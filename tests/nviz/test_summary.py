"""The list's line of a run, from samples of its files."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from nviz.store import Workspace
from nviz.store.runs import RunIndex
from nviz.store.summary import SPARK_POINTS, Summaries, Summary, sample_lines, spread
from run_folder import RunFolder, record, trained


def summary(root: Path, run_id: str = "a") -> Summary:
    """The summary of one run under `root`."""
    run = RunIndex(root).refresh()[run_id]
    return Summaries().summary(run)


def test_sealed_and_live_rows_make_one_curve(root: Path) -> None:
    trained(root, "a", steps=200)
    found = summary(root)
    assert found.step == 199
    assert found.loss == record(199)["loss/train"]
    assert found.tokens_per_s == record(199)["tokens_per_s"]
    assert found.validation == pytest.approx(2.1 + 3.4 * math.exp(-199 / 120))
    assert len(found.spark) == SPARK_POINTS
    assert found.spark[0] == record(0)["loss/train"] or found.spark[0] == record(1)["loss/train"]
    assert found.spark[-1] == record(199)["loss/train"]


def test_a_large_file_is_sampled_from_start_to_end(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(3000)])
    run.tear()
    points = sample_lines(run.path / "metrics" / "1-0.jsonl")
    steps = [point.step for point in points]
    assert steps == sorted(steps)
    assert steps[-1] == 2999 and steps[0] < 60
    assert 48 <= len(steps) <= 200
    assert max(b - a for a, b in pairwise(steps)) < 200
    assert all(point.loss == record(point.step)["loss/train"] for point in points)


def test_a_resumed_run_shows_the_later_attempt(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step, loss=9.0) for step in range(162)])
    run.append(*[record(step, loss=1.0) for step in range(110, 131)], attempt=2)
    found = summary(root)
    assert (found.step, found.loss) == (130, 1.0)
    assert set(found.spark) == {9.0, 1.0}


def test_a_nan_loss_is_shown_and_left_out_of_the_curve(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=2.0), record(1, loss=math.nan))
    found = summary(root)
    assert found.loss is not None and math.isnan(found.loss)
    assert found.spark == (2.0,)


@pytest.mark.parametrize("parts", [1, 40])
def test_a_loss_that_was_not_finite_for_one_step_is_seen_while_it_is_recent(
    root: Path, parts: int
) -> None:
    steps, each = 4000, 4000 // parts
    for at, seen in ((2999, False), (3000, True), (3456, True), (3999, True)):
        run = RunFolder(root, f"sealed-{at}")
        rows = [{"step": i, "loss/train": 2.0 if i != at else math.inf} for i in range(steps)]
        for part in range(parts):
            run.seal(*rows[part * each : (part + 1) * each], part=part)
        assert summary(root, f"sealed-{at}").bad_step == (at if seen else None)
        live = RunFolder(root, f"live-{at}")
        live.append(*[record(i, loss=math.nan if i == at else None) for i in range(steps)])
        assert summary(root, f"live-{at}").bad_step == (at if seen else None)


def test_a_loss_that_a_later_attempt_computed_again_is_not_bad_any_more(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(i, loss=math.nan if i in (5, 15) else None) for i in range(20)])
    assert summary(root).bad_step == 15
    run.append(*[record(i) for i in range(10, 30)], attempt=2, rank=1)
    assert summary(root).bad_step == 5


def test_the_result_in_run_json_goes_before_the_metrics(root: Path) -> None:
    run = RunFolder(root, "a", results={"loss/validation": 1.25})
    run.append(record(0, loss__validation=3.0))
    assert summary(root).validation == 1.25


def test_only_the_lowest_rank_counts(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=1.0), rank=2)
    run.append(record(5, loss=5.0), rank=3)
    assert summary(root).step == 0


def test_a_run_without_steps_or_with_a_broken_part_has_an_empty_line(root: Path) -> None:
    run = RunFolder(root, "a")
    assert summary(root) == Summary(step=0)
    (run.path / "metrics" / "1-0-000.parquet").write_bytes(b"no")
    assert summary(root) == Summary(step=0)


def test_the_summary_follows_the_file(root: Path) -> None:
    run, space = RunFolder(root, "a"), Workspace(root)
    run.append(record(0))
    assert space.summary(space.runs()["a"]).step == 0
    run.append(record(1))
    assert space.summary(space.runs()["a"]).step == 1


def test_the_last_evaluation_of_a_large_file_is_found_wherever_it_stands(root: Path) -> None:
    for at in (3, 1501, 2998):
        run = RunFolder(root, f"at-{at}")
        rows = [record(step) for step in range(3000)]
        rows[1] = record(1, loss__validation=9.0)
        rows[at] = record(at, loss__validation=1.5)
        run.append(*rows)
        assert summary(root, f"at-{at}").validation == 1.5


def test_an_evaluation_that_is_being_written_is_not_taken(root: Path) -> None:
    run = RunFolder(root, "a")
    rows = [record(step) for step in range(3000)]
    rows[1501] = record(1501, loss__validation=2.0)
    run.append(*rows)
    run.tear('{"step": 3000, "loss/validation": 1.')
    assert summary(root).validation == 2.0
    assert summary(root).step == 2999


def test_spread_is_even_in_steps_and_keeps_both_ends() -> None:
    dense = [(step, float(step)) for step in range(1000)]
    sparse = [(step, float(step)) for step in range(1000, 10_001, 100)]
    found = spread(dense + sparse, 41)
    assert (len(found), found[0], found[-1]) == (41, 0.0, 10_000.0)
    assert all(abs(value - 250 * i) <= 50 for i, value in enumerate(found))
    assert spread([], 40) == []
