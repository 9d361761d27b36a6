"""Curves against plain Python: attempts, axes, smoothing, down-sampling, non-finite values."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
from nviz.queries import curves
from nviz.queries.curves import Axis, Table
from nviz.store.columns import ColumnReader
from nviz.store.events import EventLog
from run_folder import START, RunFolder, record


def read(run: RunFolder, metrics: list[str], axis: Axis = "step") -> Table:
    """The run's rows from the files' columns."""
    names = {*metrics, *curves.AXIS_COLUMNS.values()} - {"step"}
    return curves.table_of(ColumnReader().rows(run.path, sorted(names)), axis)


def crashed(root: Path) -> RunFolder:
    """Attempt 1 reached step 161, attempt 2 resumed at 110 and is at 130."""
    run = RunFolder(root, "a")
    run.append(*[record(step, loss=1.0 + step) for step in range(162)])
    run.append(*[record(step, loss=1000.0 + step) for step in range(110, 131)], attempt=2)
    return run


def test_the_later_attempt_wins_from_its_first_step_on(root: Path) -> None:
    run = crashed(root)
    found = read(run, ["loss/train"])
    shown = curves.curve(found, "loss/train", ~found.superseded)
    expected = {step: 1.0 + step for step in range(110)}
    expected |= {step: 1000.0 + step for step in range(110, 131)}
    assert dict(zip(shown.x, shown.y, strict=True)) == expected
    earlier = curves.curve(found, "loss/train", found.superseded)
    assert earlier.x.tolist() == list(range(110, 162))
    assert curves.latest_of(found, ["loss/train"]) == {"loss/train": 1130.0}
    assert curves.last_step_of(ColumnReader().rows(run.path, [])) == 130


def test_evaluations_behind_a_resume_are_left_out_and_a_later_one_wins(root: Path) -> None:
    run = RunFolder(root, "a")
    for step, loss in ((10, 5.0), (20, 4.0), (30, 3.0)):
        run.event("eval", step, **{"loss/validation": loss})
    run.event("resume", 20)
    run.event("eval", 25, **{"loss/validation": float("nan")})
    run.event("eval", 20, **{"loss/validation": 3.9})
    run.event("eval", 40)
    run.event("checkpoint", 10, commit_ms=1.0)
    log = EventLog(run.path)
    log.refresh()
    found = curves.evaluations(log.events)
    assert found.pop(25) != found.get(25), "not a number"
    assert found == {10: 5.0, 20: 3.9}


def test_an_evaluation_between_records_is_placed_between_them(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(10), record(20), record(30))
    run.append(record(20, tokens=99_999_999), attempt=2)
    for axis, x in (("step", 15.0), ("tokens", (4096 * 11 + 99_999_999) / 2)):
        found = read(run, ["loss/train"], axis)
        found = curves.with_evaluations(found, {15: 2.5}, axis)
        shown = curves.curve(found, "loss/validation", ~found.superseded)
        assert (shown.x.tolist(), shown.y.tolist()) == ([x], [2.5])
        assert len(curves.curve(found, "loss/train", ~found.superseded).x) == 2


@pytest.mark.parametrize("seed", range(12))
def test_superseded_rows_agree_with_a_plain_count(root: Path, seed: int) -> None:
    drawn = random.Random(seed)
    run, start = RunFolder(root, "a"), 0
    spans: dict[int, range] = {}
    for attempt in range(1, drawn.randrange(2, 6)):
        end = start + drawn.randrange(1, 30)
        spans[attempt] = range(start, end, drawn.choice([1, 1, 3]))
        run.append(*[record(step) for step in spans[attempt]], attempt=attempt)
        start = drawn.randrange(0, end + 1)
    expected = {
        (attempt, step): any(a > attempt and s[0] <= step for a, s in spans.items())
        for attempt, span in spans.items()
        for step in span
    }
    found = read(run, [])
    keys = zip(found.attempt.tolist(), found.step.tolist(), strict=True)
    assert dict(zip(keys, found.superseded.tolist(), strict=True)) == expected
    shown = found.step[~found.superseded]
    assert len(set(shown.tolist())) == len(shown), "each step once"


def test_x_may_be_tokens_or_seconds_and_rows_without_it_are_left_out(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1), record(2, tokens=None), record(4, time_unix_s=None))
    tokens = read(run, ["loss/train"], "tokens")
    assert tokens.x.tolist() == [4096, 8192, 5 * 4096]
    seconds = read(run, ["loss/train"], "time")
    assert seconds.x.tolist() == [0.0, 0.5, 1.0]


def test_an_axis_that_no_row_has_gives_an_empty_table(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append({"step": 0, "loss/train": 1.0})
    for axis in ("tokens", "time"):
        assert len(read(run, ["loss/train"], axis).x) == 0


def test_ranks_with_skewed_clocks_stay_apart(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1), rank=0)
    run.append(record(0, time_unix_s=START - 3600), record(1, time_unix_s=START + 9), rank=1)
    reader = ColumnReader()
    assert reader.ranks(run.path) == [0, 1]
    seconds = curves.table_of(reader.rows(run.path, ["time_unix_s"], 1), "time")
    assert seconds.x.tolist() == [0.0, 3609.0]


@pytest.mark.parametrize("sealed", [False, True])
def test_non_finite_values_are_kept_apart_with_their_steps(root: Path, sealed: bool) -> None:
    run = RunFolder(root, "a")
    losses = [1.0, math.nan, math.inf, 2.0, -math.inf]
    records = [record(step, loss=value) for step, value in enumerate(losses)]
    (run.seal if sealed else run.append)(*records, record(5, loss__train=None))
    found = read(run, ["loss/train"])
    shown = curves.curve(found, "loss/train", ~found.superseded)
    assert shown.y.tolist() == [1.0, 2.0]
    assert shown.bad_step.tolist() == [1, 2, 4]
    assert shown.bad_words == ["NaN", "Infinity", "-Infinity"]


def test_the_latest_value_may_be_nan_and_missing_ones_are_looked_past(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss__validation=3.0), record(1), record(2, loss=math.nan))
    names = ["loss/train", "loss/validation"]
    found = curves.latest_of(read(run, names), names)
    assert math.isnan(found["loss/train"]) and found["loss/validation"] == 3.0


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9, 0.99])
def test_smoothing_is_the_weighted_mean_of_all_values_so_far(weight: float) -> None:
    y = np.random.default_rng(1).normal(size=60)
    expected = []
    for n in range(1, 61):
        weights = weight ** np.arange(n - 1, -1, -1, dtype=float)
        expected.append((weights * y[:n]).sum() / weights.sum())
    np.testing.assert_allclose(curves.smooth(y, weight), expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "buckets"), [(5000, 100), (1003, 500), (200_000, 500)])
def test_downsampling_keeps_each_buckets_extremes_and_both_ends(n: int, buckets: int) -> None:
    y = np.random.default_rng(n).normal(size=n)
    y[n // 3], y[n // 2] = 50.0, -50.0
    x = np.arange(n, dtype=float)
    few_x, few_y = curves.downsample(x, y, buckets)
    assert len(few_x) <= 2 * buckets + 2
    assert (np.diff(few_x) > 0).all()
    np.testing.assert_array_equal(y[few_x.astype(int)], few_y)
    assert few_x[0] == 0 and few_x[-1] == n - 1
    assert few_y.max() == 50.0 and few_y.min() == -50.0
    for piece in np.array_split(np.arange(n), 40):
        inside = few_y[(few_x >= piece[0]) & (few_x <= piece[-1])]
        assert inside.max() >= np.quantile(y[piece], 0.9)
        assert inside.min() <= np.quantile(y[piece], 0.1)


def test_a_short_curve_is_not_downsampled() -> None:
    x = y = np.arange(100, dtype=float)
    assert curves.downsample(x, y, 50)[1] is y


def test_an_empty_run_has_empty_answers(root: Path) -> None:
    assert ColumnReader().ranks(RunFolder(root, "a").path) == []
    rows = ColumnReader().rows(root / "a", ["loss/train"])
    assert curves.last_step_of(rows) is None
    assert len(curves.table_of(rows, "time").x) == 0
    assert curves.latest_of(curves.table_of(rows), ["loss/train"]) == {}


def test_a_download_has_null_where_nothing_was_recorded(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=math.nan), record(1, loss__train=None))
    found = curves.arrow(read(run, ["loss/train"]))
    assert found["step"].to_pylist() == [0, 1]
    assert math.isnan(found["loss/train"][0].as_py()) and found["loss/train"][1].as_py() is None
