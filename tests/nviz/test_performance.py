"""Performance: the stages of a step, the slowest ranks, and the page that shows them."""

import math
from pathlib import Path

import numpy as np
import pytest
from headless import EVIL, Open, figures, markup, open_page, rerun, texts, tiles, titles
from nviz.figures import stage_figure
from nviz.queries import performance
from nviz.store import columns
from nviz.store.columns import ColumnReader, Rows
from run_folder import RunFolder, record

__all__ = ["open_page"]

STAGES = ("data", "forward", "backward", "optimizer")


def rows(run: RunFolder, rank: int = 0) -> Rows:
    """All columns of a rank."""
    reader = ColumnReader()
    return reader.rows(run.path, reader.metrics(run.path, rank), rank)


def all_ranks(run: RunFolder) -> dict[int, Rows]:
    """All columns of every rank."""
    return {rank: rows(run, rank) for rank in ColumnReader().ranks(run.path)}


def times(step: int, scale: float = 1.0, **more: float) -> dict[str, float]:
    """Stage times of a step that can be told from every other step's."""
    found = {
        "step_ms": 1000.0 + step,
        "time_ms__data": 10.0 + step % 7,
        "time_ms__forward": 300.0 + step % 5,
        "time_ms__backward": 500.0,
        "time_ms__optimizer": 80.0,
        "time_ms__dispatch": 50.0,
        "time_ms__expert": 100.0,
        "time_ms__combine": 40.0,
    }
    return {name: scale * value for name, value in found.items()} | more


def test_stages_are_means_of_equal_stretches_and_the_rest_completes_the_step(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step, **times(step)) for step in range(100)])
    stages, inner = performance.stage_names(ColumnReader().metrics(run.path))
    assert (tuple(stages), inner) == (STAGES, ["dispatch", "expert", "combine"])
    found = performance.stage_times(rows(run), stages, rest=True, buckets=10)
    assert found.stages == [*STAGES, performance.REST]
    assert found.step_B.tolist() == list(range(0, 100, 10))
    for at, name in enumerate(STAGES):
        values = np.array([times(step)[f"time_ms__{name}"] for step in range(100)])
        assert found.ms_PB[at] == pytest.approx(values.reshape(10, 10).mean(axis=1), rel=1e-12)
    whole = np.array([times(step)["step_ms"] for step in range(100)]).reshape(10, 10).mean(axis=1)
    assert found.ms_PB.sum(axis=0) == pytest.approx(whole, rel=1e-12)
    assert found.share("backward") == pytest.approx(500 * 10 / whole.sum(), rel=1e-12)


def test_steps_done_again_and_values_that_are_not_finite_do_not_count(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step, **times(step, scale=9.0)) for step in range(10)])
    run.append(*[record(step, **times(step)) for step in range(5, 10)], attempt=2)
    run.append(record(10, **times(10, time_ms__data=math.nan)), attempt=2)
    found = performance.stage_times(rows(run), ["data", "forward"], rest=False, buckets=1)
    forward = [times(step, 9.0 if step < 5 else 1.0)["time_ms__forward"] for step in range(11)]
    waits = [times(step, 9.0 if step < 5 else 1.0)["time_ms__data"] for step in range(10)]
    assert found.ms_PB[:, 0] == pytest.approx([np.mean(waits), np.mean(forward)], rel=1e-12)


def test_stages_never_exceed_their_number_of_buckets(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(*[record(step, **times(step)) for step in range(2000)])
    found = performance.stage_times(rows(run), ["data"], rest=True)
    assert found.ms_PB.shape == (2, performance.BUCKETS)


def ranked(root: Path, slow: int = 2, ranks: int = 4, steps: int = 60) -> RunFolder:
    """A run whose rank `slow` works a tenth longer, while its peers wait in combine for it."""
    run = RunFolder(root, "a", layout={"dp": ranks})
    for rank in range(ranks):
        work = 880.0 if rank == slow else 800.0
        made = [
            record(
                step,
                step_ms=1000.0 + step,
                time_ms__dispatch=50.0,
                time_ms__combine=950.0 + step - work,
            )
            for step in range(steps)
        ]
        run.seal(*made, rank=rank)
    return run


def test_a_slow_rank_is_found_though_all_steps_end_together(root: Path) -> None:
    found = performance.rank_speeds(all_ranks(ranked(root)), last=20)
    assert [item.rank for item in found] == [2, 0, 1, 3]
    assert found[0].mean_ms == pytest.approx(880.0) and found[1].mean_ms == pytest.approx(800.0)
    assert found[0].relative == pytest.approx(1.1)
    assert (found[0].slowest, found[1].slowest) == (1.0, 0.0)


def test_ranks_over_steps_are_relative_to_their_median(root: Path) -> None:
    found = performance.rank_times(all_ranks(ranked(root)).items(), (0, 59), columns=6)
    assert found.ranks == [0, 1, 2, 3] and found.relative_RB.shape == (4, 6)
    assert found.step_B.tolist() == [0, 10, 20, 30, 40, 50]
    assert found.relative_RB[2] == pytest.approx([1.1] * 6)
    assert found.relative_RB[0] == pytest.approx([1.0] * 6)


def test_recorded_waiting_goes_before_the_whole_exchange(root: Path) -> None:
    run = RunFolder(root, "a")
    for rank, waited in enumerate((120.0, 20.0, 120.0)):
        made = [
            record(step, step_ms=1000.0, time_ms__dispatch=300.0 - rank, rdep__wait_ms=waited)
            for step in range(20)
        ]
        run.append(*made, rank=rank)
    found = performance.rank_speeds(all_ranks(run))
    assert [(item.rank, item.mean_ms) for item in found] == [(1, 980.0), (0, 880.0), (2, 880.0)]


def test_a_recorded_own_time_is_taken_as_it_is(root: Path) -> None:
    run = RunFolder(root, "a")
    for rank, own in enumerate((100.0, 250.0)):
        made = [record(step, **times(step), own_ms=own) for step in range(40)]
        run.append(*made, rank=rank)
    found = performance.rank_speeds(all_ranks(run))
    assert [(item.rank, item.mean_ms) for item in found] == [(1, 250.0), (0, 100.0)]


def test_steps_that_recorded_no_stage_are_left_out_of_the_stack(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    run.append(*[record(step, **times(step)) for step in range(10, 20)])
    found = performance.stage_times(rows(run), ["dispatch", "combine"], rest=False, buckets=20)
    figure = stage_figure(found, dark=False)
    for trace, value in zip(figure.data, (50.0, 40.0), strict=True):
        assert list(trace.x) == list(range(10, 20)) and list(trace.y) == [value] * 10


def test_who_waits_for_whom_is_a_mean_over_the_newest_steps(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    for rank in range(3):
        made = [
            record(
                step,
                rdep__wait_ms=30.0,
                **{f"rdep__wait_ms__{peer}": float(10 * rank + peer + step) for peer in range(3)},
            )
            for step in range(40)
        ]
        run.append(*made, rank=rank)
    found = performance.peer_waits(all_ranks(run), last=10)
    assert found is not None and (found.ranks, found.peers) == ([0, 1, 2], [0, 1, 2])
    expected = [[10 * rank + peer + 34.5 for peer in range(3)] for rank in range(3)]
    assert found.ms_RR.tolist() == expected
    assert performance.peers_of(["rdep/wait_ms", "rdep/wait_ms/x"]) == []
    assert {"Who waits for whom", "Waiting for peers"} <= set(
        titles(open_page("performance", run="a"))
    )


def test_a_rank_that_joins_late_has_gaps(root: Path) -> None:
    run = ranked(root, ranks=2, slow=0)
    run.seal(*[record(step, step_ms=900.0) for step in range(40, 60)], rank=7)
    found = performance.rank_times(all_ranks(run).items(), (0, 59), columns=6)
    assert found.ranks == [0, 1, 7]
    assert np.isnan(found.relative_RB[2, :4]).all() and np.isfinite(found.relative_RB[2, 4:]).all()


def test_the_page_reads_only_what_it_shows(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(root, "a")
    for rank in range(2):
        for part in range(4):
            steps = range(300 * part, 300 * part + 300)
            run.seal(
                *[record(step, **times(step), unseen=1.0) for step in steps], rank=rank, part=part
            )
    asked: list[tuple[str, set[str]]] = []
    read = columns.read_part

    def note(path: Path, names: list[str]) -> dict[str, columns.Column]:
        asked.append((path.name, set(names)))
        return read(path, names)

    monkeypatch.setattr(columns, "read_part", note)
    open_page("performance", run="a")
    assert asked and not any("unseen" in names for _, names in asked)
    assert {name for path, names in asked if path.startswith("1-1-") for name in names} <= {
        "step",
        *performance.OWN,
    }


def test_the_page_shows_stages_ranks_and_curves(root: Path, open_page: Open) -> None:
    ranked(root)
    app = open_page("performance", run="a")
    assert {"Step time by stage", "Inside the MoE layers", "Slowest ranks", "MFU"} <= set(
        titles(app)
    )
    assert tiles(app)["MFU"] == "31.0 %" and tiles(app)["Ranks"] == "1"
    assert "Slow: rank 2 (1.10×)." in texts(app)
    table = app.dataframe[0].value
    assert table["rank"].tolist() == [2, 0, 1, 3]
    stacked = figures(app)[0]["data"]
    assert [line["name"] for line in stacked][-1] == performance.REST
    assert {line["stackgroup"] for line in stacked} == {"stages"}


def test_the_rank_is_chosen_in_the_address(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    for rank in range(3):
        run.append(*[record(step, mfu=0.1 * (rank + 1)) for step in range(5)], rank=rank)
    assert tiles(open_page("performance", run="a", rank="2"))["MFU"] == "30.0 %"
    assert tiles(open_page("performance", run="a", rank="99"))["MFU"] == "10.0 %"


def test_hundreds_of_ranks_are_drawn_within_bounds(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", layout={"dp": 300})
    run.seal(*[record(step, step_ms=100.0 + step % 3) for step in range(400)])
    part = next((run.path / "metrics").glob("*.parquet")).read_bytes()
    for rank in range(1, 300):
        (run.path / "metrics" / f"1-{rank}-000.parquet").write_bytes(part)
    app = open_page("performance", run="a")
    heat = next(chart["data"][0] for chart in figures(app) if chart["data"][0]["type"] == "heatmap")
    assert len(heat["z"]) == 300 and len(heat["z"][0]) <= performance.COLUMNS
    assert figures(app)[2]["layout"]["height"] <= 420


@pytest.mark.parametrize(
    ("status", "words"), [("running", "No step yet"), ("failed", "ended before its first step")]
)
def test_a_run_without_steps_says_so(root: Path, open_page: Open, status: str, words: str) -> None:
    RunFolder(root, "a", status=status)
    app = open_page("performance", run="a")
    assert words in texts(app) and not figures(app)


def test_a_run_that_recorded_no_times_says_so(root: Path, open_page: Open) -> None:
    (run := RunFolder(root, "a")).append({"step": 1, "loss/train": 2.0})
    app = open_page("performance", run="a")
    assert "recorded no times" in texts(app)
    run.append(record(2))
    assert "MFU" in titles(rerun(app))


def test_names_of_stages_and_runs_stay_text(root: Path, open_page: Open) -> None:
    row = record(0) | {f"time_ms/{EVIL}": 3.0}
    RunFolder(root, "a", name=EVIL, device=EVIL).append(row, row | {"step": 1})
    app = open_page("performance", run="a")
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))
    names = [line["name"] for chart in figures(app) for line in chart["data"] if "name" in line]
    assert any("alert" in name for name in names) and not any("<" in name for name in names)


@pytest.mark.parametrize(
    ("page", "metric"),
    [("performance", "mfu"), ("router", "router__entropy"), ("run", "grad_norm")],
)
def test_values_that_are_not_finite_are_counted_below_their_chart(
    root: Path, open_page: Open, page: str, metric: str
) -> None:
    bad: dict[str, float] = {metric: math.nan}
    RunFolder(root, "a").append(record(0), record(1, **bad), record(2, **bad), record(3))
    assert "2 non-finite values" in texts(open_page(page, run="a"))
