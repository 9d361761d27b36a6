"""Runs beside one another: lines, bands and groups against NumPy, and the page."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from headless import EVIL, Open, figures, markup, open_page, rerun, texts
from nviz.queries import compare
from nviz.store import ColumnReader, Run, RunIndex
from run_folder import RunFolder, record

__all__ = ["open_page"]


def runs_of(root: Path) -> dict[str, Run]:
    """Runs by key."""
    return RunIndex(root).refresh()


def seeded(root: Path, seed: int, steps: int, group: str = "g", lr: float = 1e-3) -> RunFolder:
    """A run whose loss is its seed's noise around a slope."""
    config = {"run": {"seed": seed, "name": f"s{seed}"}, "optimizer": {"lr": lr}}
    run = RunFolder(root, f"{group}-{seed}", group=group, config=config, status="completed")
    noise = np.random.default_rng(seed).normal(size=steps)
    run.append(*[record(i, loss=float(10 - i / 100 + noise[i])) for i in range(steps)])
    return run


def test_a_line_keeps_the_extremes_of_its_run_and_its_non_finite_places(root: Path) -> None:
    run = RunFolder(root, "a")
    losses = np.random.default_rng(0).normal(size=3000)
    losses[1234], losses[2100], losses[2500] = 40.0, -40.0, np.nan
    run.append(*[record(i, loss=float(value)) for i, value in enumerate(losses)])
    found, problems = compare.Lines(ColumnReader()).draw(
        runs_of(root), ["loss/train", "none"], "step", 0.0
    )
    (line,) = found["loss/train"]
    assert problems == [] and found["none"][0].is_empty
    assert len(line.x) <= compare.MOST_POINTS + 2
    assert (line.y.max(), line.y.min()) == (40.0, -40.0)
    assert line.x[line.y.argmax()] == 1234
    assert line.bad_x.tolist() == [2500] and line.bad_words == ["NaN"]


def test_fifty_lines_have_no_more_points_than_one_may_have(root: Path) -> None:
    for number in range(50):
        RunFolder(root, f"r{number}").append(*map(record, range(600)))
    found, _ = compare.Lines(ColumnReader()).draw(runs_of(root), ["loss/train"], "step", 0.0)
    assert len(found["loss/train"]) == 50
    assert sum(len(line.x) for line in found["loss/train"]) <= compare.MOST_POINTS + 2 * 50


def test_a_line_follows_its_run_and_an_unchanged_one_is_not_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = RunFolder(root, "a"), compare.Lines(ColumnReader())
    run.append(record(0))
    draw = lambda: lines.draw(runs_of(root), ["loss/train"], "step", 0.0)[0]["loss/train"][0]  # noqa: E731
    assert draw().x.tolist() == [0]
    run.append(record(1))
    assert draw().x.tolist() == [0, 1]
    monkeypatch.setattr(ColumnReader, "rows", lambda *_: pytest.fail("read again"))
    assert draw().x.tolist() == [0, 1]


def resumed(root: Path) -> RunFolder:
    """A run of three attempts; the first one alone recorded `extra`."""
    run = RunFolder(root, "again", attempt=3)
    run.append(*[record(i, loss=9.0, extra=float(i)) for i in range(20)])
    run.append(*[record(i, loss=5.0) for i in range(10, 18)], attempt=2)
    run.append(*[record(i, loss=1.0) for i in range(15, 30)], attempt=3)
    return run


def test_what_a_later_attempt_did_again_is_drawn_on_request(root: Path) -> None:
    resumed(root)
    lines = compare.Lines(ColumnReader())
    for _ in range(2):
        plain = lines.draw(runs_of(root), ["loss/train"], "step", 0.0)[0]["loss/train"][0]
        asked = lines.draw(runs_of(root), ["loss/train"], "step", 0.0, True)[0]["loss/train"][0]
        assert plain.x.tolist() == asked.x.tolist() == list(range(30))
        assert plain.y.tolist() == [9.0] * 10 + [5.0] * 5 + [1.0] * 15
        assert len(plain.earlier_x) == 0
        gap = [math.nan]
        np.testing.assert_array_equal(asked.earlier_x, [*range(10, 20), *gap, 15, 16, 17, *gap])
        np.testing.assert_array_equal(asked.earlier_y, [9.0] * 10 + gap + [5.0] * 3 + gap)
    table = compare.arrow([asked])
    assert table["superseded"].to_pylist() == [False] * 30 + [True] * 13
    assert table["y"].to_pylist()[30:] == [9.0] * 10 + [5.0] * 3


def test_the_page_offers_earlier_attempts_and_the_metrics_that_they_alone_recorded(
    root: Path, open_page: Open
) -> None:
    RunFolder(root, "once").append(*map(record, range(30)))
    resumed(root)
    chosen = {"runs": ["again", "once"], "metrics": ["extra", "loss/train"], "smooth": "Off"}
    extra, loss = figures(open_page("compare", **chosen))
    assert names(extra) == {"again"} and names(loss) == {"again", "once"}
    _, loss = figures(open_page("compare", earlier="true", **chosen))
    assert names(loss) == {"again", "again, earlier", "once"}
    dashes = {line["name"]: line["line"]["dash"] for line in loss["data"]}
    assert dashes["again, earlier"] not in ("solid", dashes["again"])
    alone = open_page("compare", runs=["once"], earlier="true")
    assert [item.label for item in alone.toggle] == ["Log"]
    by_group = open_page("compare", by="Each group", earlier="true", **chosen)
    assert [item.label for item in by_group.toggle] == ["Log"]


def test_lines_on_one_another_are_dashed_and_named(root: Path, open_page: Open) -> None:
    for name, steps in (("a", 60), ("b", 60), ("c", 40)):
        RunFolder(root, name).append(*map(record, range(steps)))
    other = [record(i, lr__dense=1e-4) for i in range(60)]
    RunFolder(root, "other").append(*other)
    app = open_page("compare", runs=["a", "other", "b", "c"], metrics=["lr/dense"], smooth="Off")
    (figure,) = figures(app)
    dashes = {line["name"]: line["line"]["dash"] for line in figure["data"]}
    assert (dashes["a"], dashes["other"]) == ("solid", "solid")
    assert len({dashes["a"], dashes["b"], dashes["c"]}) == 3
    assert "3 lines lie on one another, dashed so that each shows: a, b, c." in texts(app)


def test_a_band_is_the_mean_and_the_extremes_of_its_runs(root: Path) -> None:
    for seed in range(4):
        seeded(root, seed, steps=compare.GRID)
    runs = {run.name: run for run in runs_of(root).values()}
    rows = compare.read(runs, ["loss/train"], ColumnReader())
    (band,) = compare.bands(rows, {"all": list(runs)}, "loss/train", "step", 0.0)
    values = np.stack([rows[name].columns["loss/train"].values for name in runs])
    assert band.runs == 4
    np.testing.assert_allclose(band.x, np.arange(compare.GRID), atol=1e-9)
    np.testing.assert_allclose(band.mean, values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(band.low, values.min(0), rtol=1e-12)
    np.testing.assert_allclose(band.high, values.max(0), rtol=1e-12)


def test_a_band_averages_around_each_point_and_goes_on_with_the_runs_that_are_left(
    root: Path,
) -> None:
    seeded(root, 0, steps=3000)
    seeded(root, 1, steps=2001)
    runs = {run.name: run for run in runs_of(root).values()}
    rows = compare.read(runs, ["loss/train"], ColumnReader())
    (band,) = compare.bands(rows, {"all": list(runs)}, "loss/train", "step", 0.0)
    assert (band.x[0], band.x[-1], band.shrinks) == (0.0, 2999.0, True)
    half = (band.x[1] - band.x[0]) / 2
    for at, count in ((150, 2), (280, 1)):
        expected = []
        for name in runs:
            step, y = rows[name].step, rows[name].columns["loss/train"].values
            inside = (step >= band.x[at] - half) & (step <= band.x[at] + half)
            expected += [y[inside].mean()] if inside.any() else []
        assert len(expected) == count
        np.testing.assert_allclose(band.mean[at], np.mean(expected), rtol=1e-9)
        np.testing.assert_allclose(band.high[at], max(expected), rtol=1e-9)


def test_runs_are_grouped_by_group_or_by_all_settings_but_the_seed(root: Path) -> None:
    for seed in range(3):
        seeded(root, seed, 2, "slow", lr=1e-4)
        seeded(root, seed, 2, "fast", lr=1e-3)
    seeded(root, 9, 2, "slow", lr=5e-4)
    runs = runs_of(root)
    by_group = compare.groups(runs, "group")
    assert {name: len(keys) for name, keys in by_group.items()} == {"slow": 4, "fast": 3}
    by_seed = compare.groups(runs, "seed")
    assert sorted(len(keys) for keys in by_seed.values()) == [1, 3, 3]
    assert by_seed["slow-9"] == ["slow-9"], "alone it keeps its own name"
    assert len(compare.groups(runs, "run")) == 7


def names(figure: dict[str, object]) -> set[str]:
    """Names of a chart's lines."""
    data = figure["data"]
    assert isinstance(data, list)
    return {line["name"] for line in data if line.get("name")}


def test_the_page_draws_the_runs_of_the_address_and_those_that_match(
    root: Path, open_page: Open
) -> None:
    for name, tag in (("a", "x"), ("b", "x"), ("c", "y")):
        RunFolder(root, name, tags=[tag]).append(*map(record, range(30)))
    app = open_page("compare", runs=["a", "c"], metrics=["loss/train", "grad_norm"])
    assert [names(figure) for figure in figures(app)] == [{"a", "c"}, {"a", "c"}]
    assert names(figures(open_page("compare", q="x"))[0]) == {"a", "b"}
    nothing = open_page("compare", q="zzz")
    assert not figures(nothing) and "Choose runs above" in texts(nothing)


def test_the_page_groups_and_tells_how_many(root: Path, open_page: Open) -> None:
    for seed in range(3):
        seeded(root, seed, 50)
    app = open_page("compare", q="g", by="Each group")
    assert names(figures(app)[0]) == {"g (3)"}


def test_the_page_counts_what_is_not_finite_and_names_who_lacks_the_metric(
    root: Path, open_page: Open
) -> None:
    RunFolder(root, "bad").append(record(0), record(1, loss=math.nan), record(2, loss=math.inf))
    RunFolder(root, "without").append({"step": 0, "grad_norm": 1.0})
    app = open_page("compare", runs=["bad", "without"], metrics=["loss/train"])
    assert "2 non-finite values" in texts(app) and "bad (2)" in texts(app)
    assert "Not recorded by without" in texts(app)


def test_a_compared_run_that_vanishes_is_named_and_the_others_stay(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nviz.store.workspace.INDEX_S", 0.0)
    for name in ("a", "b"):
        RunFolder(root, name).append(*map(record, range(5)))
    app = open_page("compare", runs=["a", "b"])
    # Between the choice of the runs and their drawing, as with a timed refresh.
    monkeypatch.setattr(
        "nviz.shell.search_by_keyboard", lambda: shutil.rmtree(root / "a", ignore_errors=True)
    )
    rerun(app)
    assert names(figures(app)[0]) == {"b"}
    assert "No longer there, moved or deleted: a" in texts(app)
    assert names(figures(rerun(app))[0]) == {"b"}


def test_hostile_names_stay_text_in_a_comparison(root: Path, open_page: Open) -> None:
    RunFolder(root, "a", name=EVIL, group=EVIL, tags=[EVIL]).append(
        record(0, loss=math.nan), record(1) | {"<img src=x onerror=alert(1)>": 1.0}
    )
    for by in ("Each run", "Each group"):
        app = open_page("compare", runs=["a"], by=by, metrics=["loss/train"])
        for sign in ("<", "](", "**", ":red["):
            assert sign not in markup(app)
        assert "<script" not in str(figures(app))
