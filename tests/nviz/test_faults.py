"""Faults: attempts and the steps they lost, the time line, and the page of both."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from headless import EVIL, Open, figures, markup, open_page, texts, tiles
from nviz.figures import time_line_figure
from nviz.queries import faults
from nviz.store.columns import ColumnReader, Rows
from nviz.store.events import Event, EventLog
from nviz.store.runs import Run, RunIndex
from run_folder import START, RunFolder, record

__all__ = ["open_page"]


def looked_at(run: RunFolder) -> tuple[Run, list[Event], Rows]:
    """The run as the index has it, its events, and the times of its records."""
    log = EventLog(run.path)
    log.refresh()
    rows = ColumnReader().rows(run.path, ["time_unix_s"])
    return RunIndex(run.path).refresh()[run.path.name], list(log.events), rows


def begun(*from_steps: int) -> list[dict[str, float]]:
    """The attempts in run.json, one an hour."""
    return [
        {"attempt": at + 1, "started_unix_s": START + 3600.0 * at, "from_step": step}
        for at, step in enumerate(from_steps)
    ]


def restarted(root: Path, **fields: object) -> RunFolder:
    """Attempt 1 dies at 161, 2 goes on after 110 and is interrupted at 150, 3 goes on there."""
    run = RunFolder(root, "a", attempt=3, attempts=begun(0, 110, 150), **fields)
    run.append(*map(record, range(1, 162)))
    run.append(*map(record, range(111, 151)), attempt=2)
    run.append(*map(record, range(151, 171)), attempt=3)
    run.event("start", 0)
    run.event("fault", 161, what="rank 3 did not answer")
    run.event("resume", 110)
    run.event("end", 150, status="interrupted")
    run.event("resume", 150)
    return run


def histories(run: RunFolder) -> list[faults.History]:
    return faults.histories(*looked_at(run))


def test_an_attempt_loses_what_the_next_one_does_again(root: Path) -> None:
    found = histories(restarted(root))
    assert [(item.attempt, item.from_step, item.reached, item.lost) for item in found] == [
        (1, 0, 161, 51),
        (2, 110, 150, 0),
        (3, 150, 170, None),
    ]
    assert [item.ended for item in found] == ["died", "interrupted", "running"]


def test_an_attempt_that_recorded_nothing_loses_nothing_more(root: Path) -> None:
    run = RunFolder(root, "a", attempt=3, attempts=begun(0, 110, 110), status="failed")
    run.append(*map(record, range(1, 162)))
    run.append(*map(record, range(111, 121)), attempt=3)
    found = histories(run)
    assert [(item.reached, item.lost) for item in found] == [(161, 51), (None, 0), (120, None)]


def test_an_attempt_that_recorded_nothing_still_held_the_steps_that_it_began_with(
    root: Path,
) -> None:
    run = RunFolder(root, "a", attempt=3, attempts=begun(0, 110, 90), status="failed")
    run.append(*map(record, range(1, 162)))
    run.append(*map(record, range(91, 121)), attempt=3)
    assert [item.lost for item in histories(run)] == [51, 20, None]


def test_attempts_follow_from_the_records_where_run_json_has_none(root: Path) -> None:
    run = RunFolder(root, "a", attempts="lost", attempt=2)
    run.append(*map(record, range(1, 31)))
    run.append(*map(record, range(21, 41)), attempt=2)
    run.event("start", 0)
    run.event("resume", 20)
    run.event("end", 40, status="completed")
    run.save(status="completed")
    found = histories(run)
    assert [(item.from_step, item.reached, item.lost) for item in found] == [
        (0, 30, 10),
        (20, 40, None),
    ]
    assert [item.ended for item in found] == ["died", "completed"]


def test_ends_go_to_the_newest_attempts_where_old_lines_are_lost(root: Path) -> None:
    run = RunFolder(root, "a", attempt=3, attempts=begun(0, 5, 9), status="completed")
    run.append(record(1))
    run.event("resume", 5)
    run.event("end", 9, status="interrupted")
    run.event("resume", 9)
    run.event("end", 12, status="completed")
    assert [item.ended for item in histories(run)] == ["died", "interrupted", "completed"]


def test_steps_of_a_recovery_that_began_an_attempt_count_once(root: Path) -> None:
    run = restarted(root)
    run.event("recovery", 110, steps_lost=51, seconds=45.5)
    run.event("recovery", 165, steps_lost=3, seconds=2.5)
    run.event("recovery", 168, steps_lost="many", seconds=math.nan)
    lost = faults.losses(looked_at(run)[1], histories(run))
    assert (lost.restarts, lost.recoveries, lost.seconds) == (51, 3, (45.5, 2.5))


def test_the_time_line_is_thinned_by_kind_and_keeps_the_rare(root: Path) -> None:
    run = RunFolder(root, "a")
    for step in range(3001):
        run.event("checkpoint", step)
    run.event("fault", 1234, what="gone", rank=7)
    _, events, _ = looked_at(run)
    found = faults.moments(events, most=100)
    saved = [item.step for item in found if item.lane == "checkpoint"]
    assert len(saved) <= 110 and (saved[0], saved[-1]) == (0, 3000)
    (fault,) = [item for item in found if item.lane == "fault"]
    assert (fault.step, fault.words) == (1234, "fault: gone, rank 7")
    assert faults.lane_counts(events) == {"fault": 1, "checkpoint": 3001}
    assert [item.time_unix_s for item in found] == sorted(item.time_unix_s for item in found)


def test_progress_keeps_each_attempts_ends_within_bounds(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(*[record(step) for step in range(1, 5001)])
    run.seal(*[record(step, time_unix_s=START + 9000 + step) for step in range(3000, 3100)],
             attempt=2)  # fmt: skip
    run.seal(*[record(step, time_unix_s=START + 1e6) for step in range(7000, 7010)], rank=3)
    first, second = faults.progress(looked_at(run)[2], buckets=50)
    assert (first.attempt, second.attempt) == (1, 2)
    assert len(first.step) <= 100 and (first.step[0], first.step[-1]) == (1, 5000)
    assert (second.step[0], second.step[-1]) == (3000, 3099)
    assert first.time_unix_s == pytest.approx(START + 0.5 * first.step)


@pytest.mark.parametrize(("attempts", "named"), [(1, False), (12, True), (13, False)])
def test_attempts_are_named_beside_the_time_line_while_they_are_few(
    attempts: int, named: bool
) -> None:
    times = np.arange(2.0)
    made = [faults.Progress(n, START + times, times) for n in range(attempts)]
    assert time_line_figure(made, [], {}, dark=False).layout.showlegend is named


def test_an_attempt_without_the_first_rank_is_not_lost(root: Path) -> None:
    run = RunFolder(root, "a", attempt=2, attempts=begun(0, 5), status="failed")
    run.append(*map(record, range(1, 10)))
    run.append(*map(record, range(6, 21)), attempt=2, rank=3)
    assert [(item.reached, item.lost) for item in histories(run)] == [(9, 4), (20, None)]


def test_the_page_shows_what_the_faults_cost(root: Path, open_page: Open) -> None:
    restarted(root)
    app = open_page("faults", run="a")
    shown = tiles(app)
    assert (shown["Attempts"], shown["Faults"], shown["Steps lost"]) == ("3", "1", "51")
    assert shown["Of all steps"] == f"{100 * 51 / (170 + 51):.1f} %"
    table = app.dataframe[0].value
    assert table["attempt"].tolist() == [3, 2, 1]
    assert table["steps lost"].fillna(-1).tolist() == [-1, 0, 51]
    line = figures(app)[0]
    assert [trace["name"] for trace in line["data"][:3]] == ["attempt 1", "attempt 2", "attempt 3"]
    lanes = {trace["name"]: trace for trace in line["data"][3:]}
    assert lanes["fault"]["y"] == ["fault (1)"]
    assert "rank 3 did not answer" in lanes["fault"]["text"][0]
    symbols = [trace["marker"]["symbol"] for trace in lanes.values()]
    assert len(set(symbols)) == len(symbols), "kinds are told apart by their shape too"


def test_events_of_one_kind_are_chosen_in_the_address(root: Path, open_page: Open) -> None:
    restarted(root)
    app = open_page("faults", run="a", kind="fault")
    assert app.dataframe[1].value["what"].tolist() == ["fault: rank 3 did not answer"]
    assert "no event of this kind" in texts(open_page("faults", run="a", kind="alert"))
    assert len(open_page("faults", run="a", kind="nonsense").dataframe[1].value) == 5


def test_an_unknown_event_and_odd_fields_are_shown(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    run.event("reshard", 5, **{"from": {"ep": 8}, "to": [1, 2], "what": 7})
    run.event("alert", 6, time_unix_s=math.inf)
    (run.path / "events.jsonl").open("a").write('{"event": "fault", "time_unix_s": 1e300}\n{"tor')
    app = open_page("faults", run="a")
    rows = app.dataframe[-1].value
    assert "reshard: 7" in "".join(rows["what"]) and '{"ep": 8}' in "".join(rows["what"])
    assert tiles(app)["Faults"] == "1"


@pytest.mark.parametrize(
    ("status", "words"), [("running", "Nothing happened yet"), ("failed", "recorded no event")]
)
def test_a_run_without_events_says_so(root: Path, open_page: Open, status: str, words: str) -> None:
    RunFolder(root, "a", status=status, attempts=[])
    app = open_page("faults", run="a")
    assert words in texts(app) and not figures(app)


def test_words_of_events_stay_text(root: Path, open_page: Open) -> None:
    # An ended run breaks no alert rule, whose names are bold.
    run = RunFolder(root, "a", name=EVIL, status="completed")
    run.event("fault", 1, what=EVIL)
    run.event(EVIL, 2, **{EVIL: EVIL})
    app = open_page("faults", run="a")
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))
    assert "<script" not in json.dumps(figures(app))


def test_thousands_of_events_and_steps_stay_small_on_the_wire(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", attempts=begun(0))
    run.seal(*[record(step) for step in range(1, 4001)])
    lines = [
        json.dumps({"time_unix_s": START + n, "event": event, "step": n}) + "\n"
        for n in range(5000)
        for event in ("checkpoint", "eval", "fault")
    ]
    (run.path / "events.jsonl").write_text("".join(lines))
    app = open_page("faults", run="a")
    points = [len(trace["x"]) for trace in figures(app)[0]["data"]]
    assert max(points) <= 2 * faults.PROGRESS_BUCKETS and sum(points) < 2500
    assert tiles(app)["Faults"] == "5,000"
    assert np.all([len(item.value) <= 1000 for item in app.dataframe])
