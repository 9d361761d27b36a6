"""Plotly figures. Colours are Okabe and Ito's, which colour-blind readers can tell apart.

A panel is a chart of a few metrics that belong together. Text that comes from a run is escaped,
since Plotly reads some HTML in names.
"""

import html
from dataclasses import dataclass, field, replace

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from nviz.queries.compare import Band, Line
from nviz.queries.curves import Array, Axis, Curve, Table, curve, downsample, smooth
from nviz.queries.experts import ImbalanceMap, LayerLoads, LoadMap
from nviz.queries.hydra import Acceptance, Agreement, Quality, Scores

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
BAD = "#D55E00"
GREY = "#8C8C8C"
# On a dark page the two blues change places: the darker one would be hard to see.
DARK_PALETTE = ("#56B4E9", *PALETTE[1:4], "#0072B2", *PALETTE[5:])
MOST_NAMED = 12
TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: its title, the line that says what to look for, metrics by label.

    `points` are labels drawn with a marker at each value; `log` says that a log scale makes sense.
    """

    title: str
    line: str
    metrics: dict[str, str]
    unit: str = ""
    points: frozenset[str] = frozenset()
    height: int = 230
    log: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """How all charts of a page are drawn.

    `smoothing` is the weight of the moving average, 0 to 1.
    """

    axis: Axis = "step"
    smoothing: float = 0.0
    log: bool = False
    earlier: bool = False
    dark: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure, and the words for the non-finite values in it: (label, what, step)."""

    figure: go.Figure
    bad: list[tuple[str, str, int]] = field(default_factory=list)


def base_figure(height: int) -> go.Figure:
    """An empty figure with the house's margins; zoom survives a refresh."""
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hovermode="x unified",
        uirevision="keep",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(automargin=True, nticks=8)
    figure.update_yaxes(automargin=True, nticks=6)
    return figure


def fix_margins(figure: go.Figure, right: int = 12) -> None:
    """Margins for axes with short labels and no legend: Plotly need not measure and draw again."""
    figure.update_layout(margin={"l": 68, "r": right, "t": 8, "b": 44, "autoexpand": False})
    figure.update_xaxes(automargin=False)
    figure.update_yaxes(automargin=False)


def panel_figure(table: Table, panel: Panel, view: View) -> Drawing | None:
    """The panel's curves, or None if the run recorded none of them."""
    shown = {label: name for label, name in panel.metrics.items() if _recorded(table, name)}
    if not shown:
        return None
    table, title = _with_unit(table, view.axis)
    figure = base_figure(panel.height)
    bad: list[tuple[str, str, int]] = []
    for colour, (label, name) in zip(_colours(panel, shown, view), shown.items(), strict=True):
        if view.earlier:
            _add_earlier(figure, table, name)
        found = curve(table, name, ~table.superseded)
        _add_curve(figure, found, html.escape(label), colour, view, label in panel.points)
        bad += [
            (label, word, int(step))
            for word, step in zip(found.bad_words, found.bad_step, strict=True)
        ]
    figure.update_layout(showlegend=len(shown) > 1 or view.earlier)
    figure.update_xaxes(title_text=title)
    figure.update_yaxes(title_text=panel.unit)
    if all(y >= 0 for trace in figure.data for y in trace.y):
        # A constant would stand in the middle of a range that begins below zero.
        figure.update_yaxes(rangemode="nonnegative")
    if view.log and panel.log:
        _use_log_scale(figure)
    if not figure.layout.showlegend:
        fix_margins(figure)
    return Drawing(figure, bad)


def add_baseline(figure: go.Figure, y: float, label: str) -> None:
    """A dashed line at height `y` over all that `figure` shows; on any scale, unlike a shape."""
    xs = [x for trace in figure.data for x in trace.x]
    figure.add_trace(
        go.Scatter(
            x=[min(xs), max(xs)],
            y=[y, y],
            name=label,
            mode="lines",
            line={"color": GREY, "width": 1.4, "dash": "dash"},
            hovertemplate="%{y:.5g}",
        )
    )
    figure.update_layout(showlegend=True)


def _with_unit(table: Table, axis: Axis) -> tuple[Table, str]:
    """The table with time in a unit that fits its span, and the axis' title."""
    seconds, title = _x_unit([table.x], axis)
    return replace(table, x=table.x / seconds), title


def _use_log_scale(figure: go.Figure) -> None:
    """Log scale with few marks: powers of ten, or 1, 2, 5 where the values span less.

    Below one power of ten Plotly's own marks are best.
    """
    values = [y for trace in figure.data for y in trace.y if y > 0]
    decades = np.log10(max(values) / min(values)) if values else 0.0
    figure.update_yaxes(type="log")
    if decades > 1:
        figure.update_yaxes(dtick=1 if decades > 2 else "D2")


def _recorded(table: Table, metric: str) -> bool:
    return metric in table.present and bool(table.present[metric].any())


def _colours(panel: Panel, shown: dict[str, str], view: View) -> list[str]:
    """A metric's colour goes with its place in the panel, whichever others are missing."""
    palette = DARK_PALETTE if view.dark else PALETTE
    return [palette[list(panel.metrics).index(label) % len(palette)] for label in shown]


def _add_curve(
    figure: go.Figure, found: Curve, label: str, colour: str, view: View, points: bool
) -> None:
    if points:
        _add_line(figure, found.x, found.y, label, colour, mode="lines+markers")
    elif view.smoothing > 0:
        _add_line(figure, found.x, found.y, label, colour, opacity=0.25, faint=True)
        _add_line(figure, found.x, smooth(found.y, view.smoothing), label, colour)
    else:
        _add_line(figure, found.x, found.y, label, colour)
    if len(found.bad_x):
        _add_bad(figure, found, label)


def _add_line(
    figure: go.Figure,
    x: Array,
    y: Array,
    label: str,
    colour: str,
    mode: str = "lines",
    opacity: float = 1.0,
    faint: bool = False,
) -> None:
    x, y = downsample(x, y)
    figure.add_trace(
        go.Scatter(
            x=x.tolist(),
            y=y.tolist(),
            name=label,
            mode=mode if len(x) > 1 else "markers",
            line={"color": colour, "width": 1.6},
            marker={"size": 6, "color": colour},
            opacity=opacity,
            showlegend=not faint,
            hoverinfo="skip" if faint else None,
            hovertemplate=None if faint else "%{y:.5g}",
        )
    )


def _add_earlier(figure: go.Figure, table: Table, metric: str) -> None:
    """Superseded rows, dotted; each attempt stands once in the legend."""
    known = {trace.legendgroup for trace in figure.data}
    for attempt in np.unique(table.attempt[table.superseded]).tolist():
        found = curve(table, metric, table.superseded & (table.attempt == attempt))
        if len(found.x) == 0:
            continue
        x, y = downsample(found.x, found.y)
        figure.add_trace(
            go.Scatter(
                x=x.tolist(),
                y=y.tolist(),
                name=f"attempt {attempt}",
                legendgroup=f"attempt {attempt}",
                showlegend=f"attempt {attempt}" not in known,
                mode="lines",
                line={"color": GREY, "width": 1.4, "dash": "dot"},
                hovertemplate="%{y:.5g}",
            )
        )


def _add_bad(figure: go.Figure, found: Curve, label: str) -> None:
    """Crosses where a value was NaN or infinite, at the height of the finite value before it."""
    heights = np.zeros(len(found.bad_x))
    if len(found.x):
        before = np.searchsorted(found.x, found.bad_x, side="right") - 1
        heights = found.y[np.clip(before, 0, len(found.y) - 1)]
    figure.add_trace(
        go.Scatter(
            x=found.bad_x.tolist(),
            y=heights.tolist(),
            name=f"{label}: non-finite",
            mode="markers",
            marker={
                "symbol": "x",
                "size": 10,
                "color": BAD,
                "line": {"width": 1, "color": "white"},
            },
            text=found.bad_words,
            hovertemplate="%{text}",
            showlegend=False,
        )
    )


DASHES = ("solid", "dash", "dot", "dashdot")


def line_style(at: int, dark: bool) -> dict[str, object]:
    """Colour and dash of line number `at`: colours first, then the same ones dashed."""
    palette = DARK_PALETTE if dark else PALETTE
    return {
        "color": palette[at % len(palette)],
        "dash": DASHES[at // len(palette) % len(DASHES)],
        "width": 1.6,
    }


def compare_figure(found: list[Line], styles: dict[str, int], view: View) -> go.Figure:
    """Curves of several runs; `styles` gives each label its number, the same in every chart."""
    figure = base_figure(320)
    unit, title = _x_unit([line.x for line in found], view.axis)
    for line in found:
        name, style = html.escape(line.label), line_style(styles[line.label], view.dark)
        figure.add_trace(
            go.Scatter(
                x=line.x / unit,
                y=line.y,
                name=name,
                mode="lines" if len(line.x) > 1 else "markers",
                line=style,
                hovertemplate="%{y:.5g}",
            )
        )
        if len(line.bad_x):
            places = Curve(line.x / unit, line.y, line.bad_x / unit, line.bad_x, line.bad_words)
            _add_bad(figure, places, name)
    _finish_comparison(figure, title, view, many=len(found) > MOST_NAMED)
    return figure


def band_figure(found: list[Band], view: View) -> go.Figure:
    """Mean of each group as a line, from lowest to highest as an area."""
    figure = base_figure(320)
    unit, title = _x_unit([band.x for band in found], view.axis)
    for at, band in enumerate(found):
        name, style = html.escape(f"{band.label} ({band.runs})"), line_style(at, view.dark)
        x = band.x / unit
        if band.runs > 1:
            figure.add_trace(
                go.Scatter(
                    x=np.concatenate([x, x[::-1]]),
                    y=np.concatenate([band.high, band.low[::-1]]),
                    fill="toself",
                    fillcolor=style["color"],
                    opacity=0.18,
                    line={"width": 0},
                    hoverinfo="skip",
                    showlegend=False,
                )
            )
        figure.add_trace(
            go.Scatter(x=x, y=band.mean, name=name, line=style, hovertemplate="%{y:.5g}")
        )
    _finish_comparison(figure, title, view, many=len(found) > MOST_NAMED)
    return figure


def _x_unit(xs: list[Array], axis: Axis) -> tuple[float, str]:
    """What to divide x by so that time is in a unit that fits its span, and the axis' title."""
    if axis != "time":
        return 1.0, axis
    longest = max((float(x.max(initial=0.0)) for x in xs), default=0.0)
    name, seconds = next((u for u in TIME_UNITS if longest >= 3 * u[1]), TIME_UNITS[-1])
    return seconds, f"{name} since the start"


def _finish_comparison(figure: go.Figure, title: str, view: View, many: bool) -> None:
    # Fifty names would leave no room for the curves: the pointer tells them.
    figure.update_layout(showlegend=not many, hovermode="closest" if many else "x unified")
    if many:
        fix_margins(figure)
        figure.update_traces(hovertemplate="%{fullData.name}: %{y:.5g}<extra></extra>")
    figure.update_xaxes(title_text=title)
    if view.log:
        _use_log_scale(figure)


def load_map_figure(found: LoadMap, height: int = 300) -> go.Figure:
    """Heat map of one layer: experts upward, steps to the right; 1 is an even share."""
    return _heat_map(
        found.load_ES,
        found.step_S.tolist(),
        list(range(found.load_ES.shape[0])),
        ("step", "expert"),
        "expert %{y}, step %{x}: %{z:.2f}× even share<extra></extra>",
        height,
    )


def layer_loads_figure(found: LayerLoads, height: int = 300) -> go.Figure:
    """Heat map of one step: layers upward, experts to the right; 1 is an even share."""
    return _heat_map(
        found.load_LE,
        list(range(found.load_LE.shape[1])),
        _rows(found.layers),
        ("expert", "layer"),
        "layer %{y}, expert %{x}: %{z:.2f}× even share<extra></extra>",
        height,
    )


def imbalance_map_figure(found: ImbalanceMap, height: int = 300) -> go.Figure:
    """Heat map of all layers: layers upward, steps to the right; 1 is even."""
    return _heat_map(
        found.imbalance_LS,
        found.step_S.tolist(),
        _rows(found.layers),
        ("step", "layer"),
        "layer %{y}, step %{x}: busiest %{z:.2f}× the mean<extra></extra>",
        height,
        lowest=1.0,
    )


def _rows(layers: list[int]) -> list[int] | list[str]:
    """Layers as places on an axis: as names where numbers would leave gaps between them.

    On even numbers Plotly paints a map as one picture, not cell by cell.
    """
    even = layers == list(range(layers[0], layers[0] + len(layers))) if layers else True
    return layers if even else [str(layer) for layer in layers]


def _heat_map(
    values: NDArray[np.float64],
    x: list[int],
    y: list[int] | list[str],
    titles: tuple[str, str],
    hover: str,
    height: int,
    lowest: float = 0.0,
) -> go.Figure:
    finite = values[np.isfinite(values)]
    # One expert far above the others must not turn all the rest into one colour.
    top = max(2.0, float(np.percentile(finite, 99.5))) if finite.size else 2.0
    figure = base_figure(height)
    figure.update_layout(hovermode="closest")
    figure.add_trace(
        go.Heatmap(
            # As bytes: a quarter of the text, and nothing to parse.
            z=values.astype(np.float32),
            x=x,
            y=y,
            zmin=lowest,
            zmax=top,
            colorscale="Viridis",
            colorbar={
                "title": {"text": "× even", "side": "right"},
                "thickness": 12,
                "outlinewidth": 0,
            },
            hovertemplate=hover,
        )
    )
    figure.update_xaxes(title_text=titles[0], showgrid=False)
    figure.update_yaxes(title_text=titles[1], showgrid=False)
    if y and isinstance(y[0], str):
        figure.update_yaxes(type="category")
    fix_margins(figure, right=84)
    return figure


def score_figure(found: Scores, view: View, height: int = 240) -> go.Figure:
    """Share of each score 0 to 5 by dimension, one group of bars per score."""
    figure = base_figure(height)
    totals = np.maximum(found.count_DS.sum(axis=1, keepdims=True), 1)
    palette = DARK_PALETTE if view.dark else PALETTE
    for at, name in enumerate(found.dimensions):
        figure.add_trace(
            go.Bar(
                x=list(range(found.count_DS.shape[1])),
                y=(found.count_DS[at] / totals[at]).tolist(),
                name=html.escape(name),
                marker={"color": palette[at % len(palette)]},
                hovertemplate="%{y:.1%}",
            )
        )
    figure.update_layout(barmode="group", showlegend=True)
    figure.update_xaxes(title_text="score", dtick=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure


def quality_figure(found: Quality, thresholds: dict[str, float], view: View) -> go.Figure:
    """Documents by quality, stacked by decision, with the thresholds as lines."""
    figure = base_figure(240)
    palette = DARK_PALETTE if view.dark else PALETTE
    middles = (found.edge_B1[:-1] + found.edge_B1[1:]) / 2
    for name, colour in (("keep", palette[2]), ("drop", palette[5])):
        if name in found.count_B:
            figure.add_trace(
                go.Bar(
                    x=middles.tolist(),
                    y=found.count_B[name].tolist(),
                    name=name,
                    marker={"color": colour},
                    hovertemplate="%{y:,}",
                )
            )
    figure.update_layout(barmode="stack", bargap=0.05, showlegend=True)
    figure.update_xaxes(title_text="quality", range=[0, 1])
    # Room above the bars for the thresholds' names.
    highest = float(sum(found.count_B.values(), np.zeros(1)).max())
    figure.update_yaxes(title_text="documents", range=[0, 1.2 * highest or 1])
    _add_thresholds(figure, thresholds)
    return figure


def acceptance_figure(found: Acceptance, view: View) -> go.Figure:
    """Share kept, precision and recall over the threshold, with the chosen thresholds as lines."""
    figure = base_figure(260)
    palette = DARK_PALETTE if view.dark else PALETTE
    for colour, (name, values) in zip(palette, found.curves.items(), strict=False):
        figure.add_trace(
            go.Scatter(
                x=found.threshold,
                y=values,
                name=name,
                mode="lines",
                line={"color": colour, "width": 1.8},
                hovertemplate="%{y:.3f}",
            )
        )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(title_text="keep from this quality on", range=[0, 1])
    figure.update_yaxes(range=[0, 1.02])
    _add_thresholds(figure, found.thresholds)
    return figure


def agreement_figure(found: list[Agreement], view: View) -> go.Figure:
    """Spearman's correlation of each head by dimension, with its interval and a line at zero."""
    figure = base_figure(280)
    palette = DARK_PALETTE if view.dark else PALETTE
    for at, head in enumerate(dict.fromkeys(item.head for item in found)):
        rows = [item for item in found if item.head == head and "spearman" in item.numbers]
        triples = np.array([item.numbers["spearman"] for item in rows]).reshape(-1, 3)
        figure.add_trace(
            go.Scatter(
                x=[html.escape(item.dimension) for item in rows],
                y=triples[:, 0].tolist(),
                name=html.escape(head),
                mode="markers",
                marker={"size": 9, "color": palette[at % len(palette)]},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": (triples[:, 2] - triples[:, 0]).tolist(),
                    "arrayminus": (triples[:, 0] - triples[:, 1]).tolist(),
                },
                hovertemplate="%{y:.3f}",
            )
        )
    figure.add_hline(y=0, line={"color": GREY, "dash": "dash", "width": 1.2})
    figure.update_layout(scattermode="group", showlegend=True)
    lows = [item.numbers["spearman"][1] for item in found if "spearman" in item.numbers]
    figure.update_yaxes(title_text="Spearman", range=[min([-0.3, *lows]) - 0.02, 1.05])
    return figure


def _add_thresholds(figure: go.Figure, thresholds: dict[str, float]) -> None:
    for name, value in thresholds.items():
        figure.add_vline(
            x=value,
            line={"color": GREY, "dash": "dot", "width": 1.4},
            annotation_text=html.escape(f"{name} {value:.2f}"),
            annotation_position="top left" if name == "drop" else "top right",
        )
