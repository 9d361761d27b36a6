"""Figures of the pages on performance, GPUs, faults, data and checkpoints, as in `charts`.

Kinds of events and decisions are told apart by a symbol or a place too, never by colour alone. Text
that comes from a run is escaped, since Plotly reads some HTML in names.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from nviz import formats
from nviz.charts import DARK_PALETTE, GREY, PALETTE, around, base_figure
from nviz.formats import chart_text
from nviz.queries.checkpoints import Part
from nviz.queries.data import Share, Statistics
from nviz.queries.faults import LANE_ORDER, Moment, Progress
from nviz.queries.gpus import ReadingMap, Readings
from nviz.queries.performance import REST, PeerWaits, RankTimes, StageTimes

SYMBOLS = {
    "fault": "x",
    "recovery": "cross",
    "alert": "triangle-up",
    "start, resume": "triangle-right",
    "checkpoint": "square",
    "evaluation": "circle",
    "end": "diamond",
    "other": "circle-open",
}
# Places in the palette.
LANE_COLOURS = {
    "fault": 5,
    "recovery": 2,
    "alert": 1,
    "start, resume": 0,
    "checkpoint": 4,
    "evaluation": 3,
    "end": 0,
    "other": 7,
}
ROW_PX = 17
# Signs of an event's words.
MOST_WORDS = 200
# More attempts are named by the pointer alone.
MOST_NAMED_ATTEMPTS = 12
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def palette(dark: bool) -> tuple[str, ...]:
    """The colours for the reader's theme."""
    return DARK_PALETTE if dark else PALETTE


def stage_figure(found: StageTimes, dark: bool, height: int = 300) -> go.Figure:
    """Milliseconds of each stage over steps, stacked; what no stage explains is grey, on top.

    Stretches of steps in which no stage was recorded are left out: a stack would draw them as 0.
    """
    figure = base_figure(height)
    colours = palette(dark)
    known_B = np.isfinite(found.ms_PB).any(axis=0)
    for at, name in enumerate(found.stages):
        colour = GREY if name == REST else colours[at % (len(colours) - 1)]
        figure.add_trace(
            go.Scatter(
                x=found.step_B[known_B].tolist(),
                y=np.round(found.ms_PB[at, known_B], 4).tolist(),
                name=chart_text(name),
                mode="lines",
                stackgroup="stages",
                line={"width": 0.6, "color": colour},
                hovertemplate="%{y:.4g} ms",
            )
        )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="ms a step", rangemode="tozero")
    return figure


def rank_map_figure(found: RankTimes, dark: bool) -> go.Figure:
    """Ranks upward, steps to the right; 1 is the ranks' median, a slow rank is orange."""
    ground = "#262B35" if dark else "#F4F4F4"
    colours = palette(dark)
    figure = base_figure(map_height(len(found.ranks)))
    figure.add_trace(
        go.Heatmap(
            z=np.round(found.relative_RB, 4).tolist(),
            x=found.step_B.tolist(),
            y=[str(rank) for rank in found.ranks],
            zmin=0.7,
            zmax=1.3,
            colorscale=[[0.0, colours[0]], [0.5, ground], [1.0, colours[5]]],
            colorbar=_colour_bar("× median"),
            hovertemplate="rank %{y}, step %{x}: %{z:.3f}× median<extra></extra>",
        )
    )
    _as_map(figure, "step")
    return figure


def waits_figure(found: PeerWaits) -> go.Figure:
    """Ranks upward, the peers that they wait for to the right."""
    figure = base_figure(map_height(len(found.ranks)))
    figure.add_trace(
        go.Heatmap(
            z=np.round(found.ms_RR, 3).tolist(),
            x=[str(peer) for peer in found.peers],
            y=[str(rank) for rank in found.ranks],
            zmin=0.0,
            colorscale="Viridis",
            colorbar=_colour_bar("ms a step"),
            hovertemplate="rank %{y} waits %{z:.3g} ms a step for peer %{x}<extra></extra>",
        )
    )
    _as_map(figure, "peer in the expert group")
    figure.update_xaxes(type="category", nticks=12)
    return figure


def map_height(ranks: int) -> int:
    """Height of a heat map with a row a rank, in pixels."""
    return int(np.clip(90 + ROW_PX * ranks, 160, 420))


def _colour_bar(title: str) -> dict[str, object]:
    return {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0}


def _as_map(figure: go.Figure, x_title: str | None) -> None:
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title_text=x_title, showgrid=False)
    figure.update_yaxes(title_text="rank", showgrid=False, type="category", nticks=12)


def times(unix_s: NDArray[np.float64]) -> list[datetime | None]:
    """Seconds since the epoch as times in UTC."""
    return [formats.moment(float(value)) for value in unix_s]


def readings_figure(found: Sequence[Readings], unit: str, dark: bool) -> go.Figure:
    """A reading over time, a line a rank."""
    figure = base_figure(230)
    colours = palette(dark)
    for at, item in enumerate(found):
        figure.add_trace(
            go.Scatter(
                x=times(item.time_unix_s),
                y=item.value.tolist(),
                name=f"rank {item.rank}",
                mode="lines" if len(item.value) > 1 else "markers",
                line={"color": colours[at % len(colours)], "width": 1.4},
                hovertemplate="%{y:.4g}",
            )
        )
    figure.update_layout(showlegend=len(found) > 1)
    figure.update_yaxes(title_text=unit)
    values = np.concatenate([item.value for item in found]) if found else np.zeros(1)
    if values.min() == values.max():
        figure.update_yaxes(range=around(float(values[0])))
    return figure


def reading_map_figure(found: ReadingMap, unit: str) -> go.Figure:
    """A reading over time, a row a rank."""
    figure = base_figure(map_height(len(found.ranks)))
    finite = found.value_RB[np.isfinite(found.value_RB)]
    constant = bool(finite.size) and finite.min() == finite.max()
    low, high = around(float(finite[0])) if constant else (None, None)
    figure.add_trace(
        go.Heatmap(
            z=np.round(found.value_RB, 3).tolist(),
            zmin=low,
            zmax=high,
            x=times(found.time_unix_s_B),
            y=[str(rank) for rank in found.ranks],
            colorscale="Viridis",
            colorbar=_colour_bar(unit),
            hovertemplate="rank %{y}, %{x}: %{z:.4g} " + unit + "<extra></extra>",
        )
    )
    _as_map(figure, None)
    return figure


def time_line_figure(
    progress: Sequence[Progress], moments: Sequence[Moment], counts: dict[str, int], dark: bool
) -> go.Figure:
    """Steps over time, an attempt a line, and below them, on the same axis, events by lane."""
    lanes = [lane for lane in reversed(LANE_ORDER) if lane in counts]
    figure = base_figure(230 + 26 * len(lanes))
    below = 26 * len(lanes) / (190 + 26 * len(lanes))
    figure.set_subplots(
        rows=2, shared_xaxes=True, vertical_spacing=0.04, row_heights=[1 - below, below]
    )
    _add_progress(figure, progress, dark)
    labels = {lane: f"{lane} ({counts[lane]:,})" for lane in lanes}
    for lane, label in labels.items():
        _add_lane(figure, lane, label, [item for item in moments if item.lane == lane], dark)
    figure.update_layout(hovermode="closest", showlegend=1 < len(progress) <= MOST_NAMED_ATTEMPTS)
    figure.update_xaxes(automargin=True, nticks=8)
    figure.update_yaxes(automargin=True, title_text="step", row=1, col=1)
    figure.update_yaxes(
        automargin=True,
        type="category",
        categoryorder="array",
        categoryarray=list(labels.values()),
        range=[-0.6, len(lanes) - 0.4],
        row=2,
        col=1,
    )
    return figure


def _add_progress(figure: go.Figure, progress: Sequence[Progress], dark: bool) -> None:
    colours = palette(dark)
    for at, item in enumerate(progress):
        figure.add_trace(
            go.Scatter(
                x=times(item.time_unix_s),
                y=item.step.tolist(),
                name=f"attempt {item.attempt}",
                mode="lines" if len(item.step) > 1 else "markers",
                line={"color": colours[at % len(colours)], "width": 1.8},
                hovertemplate="step %{y:,}, %{x}",
            ),
            row=1,
            col=1,
        )


def _add_lane(figure: go.Figure, lane: str, label: str, moments: list[Moment], dark: bool) -> None:
    steps = ["" if item.step is None else f"step {item.step:,}<br>" for item in moments]
    words = [chart_text(item.words, MOST_WORDS) for item in moments]
    figure.add_trace(
        go.Scatter(
            x=[formats.moment(item.time_unix_s) for item in moments],
            y=[label] * len(moments),
            name=lane,
            mode="markers",
            showlegend=False,
            marker={
                "symbol": SYMBOLS[lane],
                "size": 10,
                "color": palette(dark)[LANE_COLOURS[lane]],
            },
            text=[step + what for step, what in zip(steps, words, strict=True)],
            hovertemplate="%{text}<br>%{x}<extra></extra>",
        ),
        row=2,
        col=1,
    )


def bars_figure(
    names: Sequence[str], values: Sequence[float], title: str, hover: str, dark: bool
) -> go.Figure:
    """Horizontal bars, the first one on top; `hover` is a Plotly template of a bar's value."""
    figure = base_figure(max(150, 60 + 26 * len(names)))
    figure.add_trace(
        go.Bar(
            x=list(values),
            y=[chart_text(name, 34) for name in names],
            orientation="h",
            marker={"color": palette(dark)[0]},
            hovertemplate=f"%{{y}}: {hover}<extra></extra>",
        )
    )
    figure.update_layout(hovermode="closest", showlegend=False, bargap=0.3)
    figure.update_xaxes(title_text=title, rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed", nticks=len(names))
    return figure


def shares_figure(shares: Sequence[Share], dark: bool) -> go.Figure:
    """Each source's part of the tokens."""
    total = max(1, sum(share.tokens for share in shares))
    figure = bars_figure(
        [share.group for share in shares],
        [share.tokens / total for share in shares],
        "share of the tokens",
        "%{x:.1%}",
        dark,
    )
    figure.update_xaxes(tickformat=".0%")
    return figure


def lengths_figure(found: Statistics, dark: bool) -> go.Figure:
    """Documents by their length in tokens, on a log scale."""
    figure = base_figure(260)
    edges = found.edge_B1
    figure.add_trace(
        go.Bar(
            x=np.sqrt(edges[:-1] * edges[1:]).tolist(),
            y=found.count_B.tolist(),
            width=np.diff(edges).tolist(),
            marker={"color": palette(dark)[2], "line": {"width": 0}},
            customdata=[
                f"{int(low):,} to {int(high) - 1:,}" for low, high in pairwise(edges.tolist())
            ],
            hovertemplate="%{customdata} tokens: %{y:,} documents<extra></extra>",
        )
    )
    figure.update_layout(hovermode="closest", showlegend=False, bargap=0)
    marks = sorted({float(f"{mark:.1g}") for mark in np.geomspace(edges[0], edges[-1], 7)})
    words = [formats.short(mark) for mark in marks]
    figure.update_xaxes(
        title_text="tokens of a document", type="log", tickvals=marks, ticktext=words
    )
    figure.update_yaxes(title_text="documents", rangemode="tozero")
    return figure


def parts_figure(parts: Sequence[Part], dark: bool) -> go.Figure:
    """Size of each part of a checkpoint, in a unit that fits the largest."""
    largest = max((part.bytes for part in parts), default=0)
    unit, size = next(((u, s) for u, s in SIZES if largest >= s), SIZES[-1])
    return bars_figure(
        [part.name for part in parts],
        [part.bytes / size for part in parts],
        unit,
        f"%{{x:.4g}} {unit}",
        dark,
    )
