"""Figures: how many points they carry, what they mark, and that names cannot become markup."""

import math
from pathlib import Path

import numpy as np
import pytest
from nviz.charts import (
    DARK_PALETTE,
    ON_TOP,
    PALETTE,
    Panel,
    View,
    add_baseline,
    base_figure,
    panel_figure,
    tell_apart,
)
from nviz.queries import curves
from nviz.queries.curves import Table
from nviz.queries.experts import LayerBias, LayerLoads, LoadMap
from nviz.router_figures import bias_map_figure, layer_loads_figure, load_map_figure
from nviz.store.columns import ColumnReader
from run_folder import RunFolder, record

LOSS = Panel("Loss", "…", {"training": "loss/train", "other": "loss/ce"}, log=True)


def made(values: dict[str, np.ndarray], x: np.ndarray | None = None) -> Table:
    """A table of one attempt."""
    n = len(next(iter(values.values())))
    steps = np.arange(n, dtype=float)
    return Table(
        step=steps,
        x=steps if x is None else x,
        attempt=np.ones(n, dtype=np.int64),
        superseded=np.zeros(n, dtype=bool),
        values=values,
        present={name: np.ones(n, dtype=bool) for name in values},
    )


def test_two_hundred_thousand_steps_become_about_a_thousand_points() -> None:
    y = np.random.default_rng(0).normal(size=200_000)
    y[123_456] = 99.0
    drawing = panel_figure(made({"loss/train": y}), LOSS, View(smoothing=0.9))
    assert drawing is not None
    raw, smooth = drawing.figure.data
    assert len(raw.x) <= 1002 and len(smooth.x) <= 1002
    assert max(raw.y) == 99.0
    assert max(smooth.y) < 20


def test_non_finite_values_are_crosses_at_their_place_and_are_counted() -> None:
    y = np.array([math.nan, 5.0, 4.0, math.inf, 3.0])
    drawing = panel_figure(made({"loss/train": y}), LOSS, View())
    assert drawing is not None
    assert drawing.bad == [("training", "NaN", 0), ("training", "Infinity", 3)]
    line, crosses = drawing.figure.data
    assert list(line.x) == [1, 2, 4]
    assert list(crosses.x) == [0, 3] and list(crosses.y) == [5.0, 4.0]
    assert crosses.marker.symbol == "x"


def test_only_non_finite_values_still_show() -> None:
    drawing = panel_figure(made({"loss/train": np.array([math.nan] * 3)}), LOSS, View(log=True))
    assert drawing is not None and len(drawing.bad) == 3


def test_a_panel_of_metrics_that_were_never_recorded_is_left_out() -> None:
    table = made({"loss/train": np.zeros(3)})
    table.present["loss/train"][:] = False
    assert panel_figure(table, LOSS, View()) is None


def test_colours_stay_when_another_metric_is_missing_and_suit_the_theme() -> None:
    table = made({"loss/ce": np.ones(3)})
    for view, palette in ((View(), PALETTE), (View(dark=True), DARK_PALETTE)):
        drawing = panel_figure(table, LOSS, view)
        assert drawing is not None
        assert drawing.figure.data[0].line.color == palette[1]
    assert sorted(PALETTE) == sorted(DARK_PALETTE)


def test_earlier_attempts_are_drawn_dotted_on_request_only(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    run.append(*[record(step) for step in range(5, 8)], attempt=2)
    table = curves.table_of(ColumnReader().rows(run.path, ["loss/train", "loss/ce"]))
    plain = panel_figure(table, LOSS, View())
    asked = panel_figure(table, LOSS, View(earlier=True))
    assert plain is not None and asked is not None
    assert [trace.name for trace in plain.figure.data] == ["training", "other"]
    assert list(plain.figure.data[0].x) == list(range(8))
    dotted = [trace for trace in asked.figure.data if trace.line.dash == "dot"]
    assert [list(trace.x) for trace in dotted] == [[5, 6, 7, 8, 9]] * 2
    assert [trace.showlegend for trace in dotted] == [True, False]


def dashes_of(*lines: tuple[np.ndarray, np.ndarray], log: bool = False) -> list[str | None]:
    """How the lines are dashed once they are told apart."""
    figure = base_figure(100)
    for at, (x, y) in enumerate(lines):
        figure.add_scatter(x=x, y=y, name=str(at), mode="lines")
    tell_apart(figure, log)
    return [line.line.dash for line in figure.data]


def test_only_lines_that_look_like_one_are_dashed() -> None:
    x = np.arange(100.0)
    y = np.sin(x / 20)
    assert dashes_of((x, y), (x[::3], y[::3]), (x[:60], y[:60])) == [None, *ON_TOP[:2]]
    assert dashes_of((x, y), (x, y + 0.02)) == [None, None]
    assert dashes_of((x, y), (x + 90, np.sin((x + 90) / 20))) == [None, None], "they share little"
    assert dashes_of((x, y), (x, np.where(x < 80, y, 3.0))) == [None, None]
    assert dashes_of((x, y), (x[:1], y[:1])) == [None, None], "a point"
    assert dashes_of((x, np.full(100, 3.0)), (x, np.full(100, 3.0))) == [None, ON_TOP[0]]
    # Far below the others they are apart on a log scale alone.
    high, low, lower = np.full(100, 1.0), np.full(100, 1e-5), np.full(100, 1e-6)
    assert dashes_of((x, high), (x, low), (x, lower)) == [None, None, ON_TOP[0]]
    assert dashes_of((x, high), (x, low), (x, lower), log=True) == [None, None, None]
    # Zeros are not drawn on a log scale, and lines may still be one beside them.
    rate = np.minimum(x / 50, 1.0)
    assert dashes_of((x, rate), (x, rate), log=True) == [None, ON_TOP[0]]
    assert dashes_of((x, rate), (x, np.maximum(rate, 0.02)), log=True) == [None, None]
    assert dashes_of((x, 0 * x), (x, 0 * x), log=True) == [None, None]


def test_an_earlier_attempt_under_a_curve_leaves_it_whole(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    run.append(*[record(step) for step in range(10)], attempt=2)
    table = curves.table_of(ColumnReader().rows(run.path, ["loss/train"]))
    asked = panel_figure(table, LOSS, View(earlier=True))
    assert asked is not None
    assert [line.line.dash for line in asked.figure.data] == ["dot", None]


@pytest.mark.parametrize(
    ("seconds", "unit", "last"),
    [(100, "seconds", 100), (1200, "minutes", 20), (36000, "hours", 10)],
)
def test_time_is_in_a_unit_that_fits(seconds: float, unit: str, last: float) -> None:
    table = made({"loss/train": np.ones(3)}, x=np.array([0.0, seconds / 2, seconds]))
    drawing = panel_figure(table, LOSS, View(axis="time"))
    assert drawing is not None
    assert drawing.figure.layout.xaxis.title.text == f"{unit} since the start"
    assert drawing.figure.data[0].x[-1] == last


@pytest.mark.parametrize("constant", [3.0, -2.0, 0.0, 1e30, 1e-30])
def test_a_constant_stands_within_a_range_that_holds_zero(constant: float) -> None:
    table = made({"loss/train": np.full(50, constant)})
    drawn = panel_figure(table, LOSS, View())
    assert drawn is not None
    low, high = drawn.figure.layout.yaxis.range
    assert low <= min(constant, 0.0) <= max(constant, 0.0) <= high and low < high
    if constant > 0:
        logged = panel_figure(table, LOSS, View(log=True))
        assert logged is not None and logged.figure.layout.yaxis.range is None


def test_log_scale_is_used_only_where_it_makes_sense() -> None:
    table = made({"loss/train": np.array([0.0, 1.0, 1000.0])})
    with_log = panel_figure(table, LOSS, View(log=True))
    without = panel_figure(table, Panel("a", "b", LOSS.metrics), View(log=True))
    assert with_log is not None and without is not None
    assert with_log.figure.layout.yaxis.type == "log"
    assert without.figure.layout.yaxis.type != "log"


def test_a_baseline_spans_the_curves_at_its_height_on_a_log_scale_too() -> None:
    drawing = panel_figure(made({"loss/train": np.array([9.0, 5.0, 3.0])}), LOSS, View(log=True))
    assert drawing is not None
    add_baseline(drawing.figure, 6.5, "unigram baseline")
    line = drawing.figure.data[-1]
    assert (list(line.x), list(line.y), line.line.dash) == ([0, 2], [6.5, 6.5], "dash")
    assert line.name == "unigram baseline" and drawing.figure.layout.showlegend


def test_names_are_escaped_for_plotly() -> None:
    panel = Panel("x", "y", {"<a href='javascript:1'>x</a>": "loss/train"})
    drawing = panel_figure(made({"loss/train": np.ones(3)}), panel, View())
    assert drawing is not None
    assert "<" not in drawing.figure.data[0].name


def test_heat_maps_put_an_even_share_in_the_middle_of_the_colours() -> None:
    load = LoadMap(np.array([0, 10]), np.array([[1.0, 0.0], [1.0, 2.0]]))
    figure = load_map_figure(load)
    assert np.asarray(figure.data[0].z).tolist() == [[1.0, 0.0], [1.0, 2.0]]
    assert list(figure.data[0].x) == [0, 10] and list(figure.data[0].y) == [0, 1]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0.0, 2.0)
    loads = np.array([[np.nan, 1.0], [1.0, 1.0]])
    apart = layer_loads_figure(LayerLoads(10, [3, 9], loads))
    assert (list(apart.data[0].y), apart.layout.yaxis.type) == (["3", "9"], "category")
    # Numbers, which Plotly paints as one picture.
    neighbours = layer_loads_figure(LayerLoads(10, [3, 4], loads))
    assert (list(neighbours.data[0].y), neighbours.layout.yaxis.type) == ([3, 4], None)


def test_the_bias_has_zero_in_the_middle_of_the_colours() -> None:
    found = LayerBias(10, [1, 2], np.array([[-0.5, 0.1], [0.2, np.nan]]))
    (drawn,) = bias_map_figure(found, dark=False).data
    assert (drawn.zmin, drawn.zmax) == (-0.5, 0.5)
    assert [place for place, _ in drawn.colorscale] == [0.0, 0.5, 1.0]
