"""Plotly figures. Colours are Okabe and Ito's, which colour-blind readers can tell apart.

A panel is a chart of a few metrics that belong together. Text that comes from a run is escaped,
since Plotly reads some HTML in names.
"""

import html
import math
from dataclasses import dataclass, field, replace

import numpy as np
import plotly.graph_objects as go

from nviz.formats import chart_text
from nviz.queries.compare import Band, Line
from nviz.queries.curves import Array, Axis, Curve, Table, curve, downsample, smooth

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
        _add_curve(figure, found, chart_text(label), colour, view, label in panel.points)
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
    heights = {y for trace in figure.data for y in trace.y}
    if len(heights) == 1 and not (view.log and panel.log):
        figure.update_yaxes(range=around(heights.pop()))
    tell_apart(figure, log=view.log and panel.log)
    if view.log and panel.log:
        _use_log_scale(figure)
    if not figure.layout.showlegend:
        fix_margins(figure)
    return Drawing(figure, bad)


def around(constant: float) -> list[float]:
    """A range for values that are all the same, where Plotly would blow up the last digits."""
    return sorted((0.0, 1.2 * constant or 1.0))


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
    """Log scale with few marks, each with its whole value: Plotly would write 5 for 0.5."""
    values = [float(y) for trace in figure.data for y in trace.y if y > 0]
    figure.update_yaxes(type="log")
    if values:
        marks = log_marks(min(values), max(values))
        figure.update_yaxes(tickvals=marks, ticktext=[f"{mark:.6g}" for mark in marks])


def log_marks(low: float, high: float) -> list[float]:
    """Some round values from `low` to `high`, both above 0: powers of ten, or 1, 2, 5 of each, or
    at even distances where they span less than one power.
    """
    decades = np.log10(high / low)
    if decades <= 1:
        raw = max(high - low, high * 1e-6) / 5
        power = 10.0 ** np.floor(np.log10(raw))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw * (1 - 1e-9))
        return [float(at * step) for at in range(math.ceil(low / step), int(high / step) + 1)]
    every = max(1, math.ceil(decades / 8))
    digits = (1, 2, 5) if decades < 2 else (1,)
    powers = range(math.floor(np.log10(low)), math.ceil(np.log10(high)) + 1, every)
    marks = [float(digit * 10.0**power) for power in powers for digit in digits]
    return [mark for mark in marks if low <= mark <= high]


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
    # With no finite value anywhere any height will do that a log scale has, too.
    heights = np.ones(len(found.bad_x))
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
# Lines closer than this part of a chart's height, a pixel or two, look like one.
SAME = 200
# Of lines on one another the lowest is solid; the next ones leave it and each other room.
ON_TOP = ("12px,12px", "6px,6px", "3px,3px")


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
        name, style = chart_text(line.label), line_style(styles[line.label], view.dark)
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
        if len(line.earlier_x):
            _add_earlier_line(figure, line, unit, style["color"])
        if len(line.bad_x):
            places = Curve(line.x / unit, line.y, line.bad_x / unit, line.bad_x, line.bad_words)
            _add_bad(figure, places, name)
    _finish_comparison(figure, title, view, many=len(found) > MOST_NAMED)
    return figure


def _add_earlier_line(figure: go.Figure, line: Line, unit: float, colour: object) -> None:
    figure.add_trace(
        go.Scatter(
            x=line.earlier_x / unit,
            y=line.earlier_y,
            name=chart_text(f"{line.label}, earlier"),
            mode="lines",
            line={"color": colour, "width": 1.2, "dash": "2px,3px"},
            opacity=0.8,
            showlegend=False,
            hovertemplate="%{y:.5g}",
        )
    )


def tell_apart(figure: go.Figure, log: bool = False) -> list[list[str]]:
    """Dashes the lines of `figure` that lie on another one, so that it shows through the gaps.

    Returns the names of the lines that lie on one another. Two do where they share half of the
    shorter one's width, and nowhere there are farther apart than a `SAME`-th of the chart's height.
    """
    lines = [
        (trace, np.asarray(trace.x, dtype=np.float64), _height(trace.y, log))
        for trace in figure.data
        if trace.mode == "lines"
        and trace.showlegend is not False
        # An earlier attempt is dotted anyway.
        and trace.legendgroup is None
        and len(trace.x) > 1
    ]
    heights = np.concatenate([y[np.isfinite(y)] for _, _, y in lines] or [np.zeros(0)])
    near = np.ptp(heights) / SAME if len(heights) else 0.0
    groups: list[list[tuple[go.Scatter, Array, Array]]] = []
    for line in lines:
        group = next((g for g in groups if _lie_on_one_another(g[0][1:], line[1:], near)), None)
        if group is None:
            groups.append([line])
        else:
            group.append(line)
            line[0].line.dash = ON_TOP[(len(group) - 2) % len(ON_TOP)]
    return [[html.unescape(trace.name) for trace, *_ in group] for group in groups if group[1:]]


def _height(y: object, log: bool) -> Array:
    found = np.asarray(y, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(found) if log else found


def _lie_on_one_another(one: tuple[Array, Array], other: tuple[Array, Array], near: float) -> bool:
    (x, y), (other_x, other_y) = one, other
    first, last = max(x[0], other_x[0]), min(x[-1], other_x[-1])
    shorter = min(x[-1] - x[0], other_x[-1] - other_x[0])
    if last <= first or last - first < shorter / 2:
        return False
    shared = np.unique(np.concatenate([x, other_x]))
    shared = shared[(shared >= first) & (shared <= last)]
    height, other_height = np.interp(shared, x, y), np.interp(shared, other_x, other_y)
    # A zero has no place on a log scale: there both leave the chart, or they part.
    drawn = np.isfinite(height)
    if not drawn.any() or (drawn != np.isfinite(other_height)).any():
        return False
    return bool((np.abs(height[drawn] - other_height[drawn]) <= near + 1e-12).all())


def band_figure(found: list[Band], view: View) -> go.Figure:
    """Mean of each group as a line, from lowest to highest as an area."""
    figure = base_figure(320)
    unit, title = _x_unit([band.x for band in found], view.axis)
    for at, band in enumerate(found):
        name, style = chart_text(f"{band.label} ({band.runs})"), line_style(at, view.dark)
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
