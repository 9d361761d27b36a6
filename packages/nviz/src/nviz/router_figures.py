"""Heat maps of the router: load, imbalance and bias of experts, layers and steps."""

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from nviz.charts import BAD, DARK_PALETTE, PALETTE, base_figure, fix_margins
from nviz.queries.experts import ImbalanceMap, LayerBias, LayerLoads, LoadMap


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


def bias_map_figure(found: LayerBias, dark: bool, height: int = 240) -> go.Figure:
    """Heat map of the bias: layers upward, experts to the right; 0 is the page's own colour."""
    figure = _heat_map(
        found.bias_LE,
        list(range(found.bias_LE.shape[1])),
        _rows(found.layers),
        ("expert", "layer"),
        "layer %{y}, expert %{x}: bias %{z:.4g}<extra></extra>",
        height,
    )
    finite = np.abs(found.bias_LE[np.isfinite(found.bias_LE)])
    reach = float(finite.max(initial=0.0)) or 1.0
    low, ground, high = (DARK_PALETTE[0], "#1B1F27", BAD) if dark else (PALETTE[0], "#F4F4F4", BAD)
    figure.update_traces(
        zmin=-reach,
        zmax=reach,
        colorscale=[[0.0, low], [0.5, ground], [1.0, high]],
        colorbar_title_text="bias",
    )
    return figure


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
