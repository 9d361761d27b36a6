"""Charts of the judge pipeline: scores, quality of documents, acceptance, agreement."""

import numpy as np
import plotly.graph_objects as go

from nviz.charts import DARK_PALETTE, GREY, PALETTE, View, base_figure
from nviz.formats import chart_text
from nviz.queries.hydra import Acceptance, Agreement, Quality, Scores


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
                name=chart_text(name),
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
                x=[chart_text(item.dimension) for item in rows],
                y=triples[:, 0].tolist(),
                name=chart_text(head),
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
            annotation_text=chart_text(f"{name} {value:.2f}"),
            annotation_position="top left" if name == "drop" else "top right",
        )
