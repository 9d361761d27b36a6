"""The router's health: load of each expert over time and by layer, imbalance, idle experts."""

from dataclasses import dataclass

import numpy as np
import streamlit as st

from nviz import formats, shell
from nviz.charts import View, panel_figure
from nviz.panels import ROUTER_PANELS
from nviz.queries import curves, experts
from nviz.queries.experts import Idle, ImbalanceMap, LayerBias, LayerLoads, LoadMap
from nviz.router_figures import (
    bias_map_figure,
    imbalance_map_figure,
    layer_loads_figure,
    load_map_figure,
)
from nviz.store import Run

NAMED = 6


def idle_names(found: list[tuple[int, list[int]]]) -> str:
    """Experts by layer in words, the first `NAMED` layers."""
    names = [
        f"layer {layer}, expert{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))}"
        for layer, idle in found
        if idle
    ]
    more = f"; and {len(names) - NAMED} more layers" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more


def idle_line(looked_at: int, found: list[Idle]) -> None:
    """Names dead and starved experts, or says that there are none."""
    since = f"in the last {looked_at} recorded steps"
    dead = sum(len(idle.dead) for idle in found)
    starved = sum(len(idle.starved) for idle in found)
    if dead:
        names = idle_names([(idle.layer, idle.dead) for idle in found])
        st.error(f"{dead} dead: no token {since} ({names}).", icon=":material/error:")
    if starved:
        names = idle_names([(idle.layer, idle.starved) for idle in found])
        st.warning(
            f"{starved} starved: below a tenth of an even share {since} ({names}).",
            icon=":material/warning:",
        )
    if not found:
        st.success(f"No idle expert: all got tokens {since}.", icon=":material/check_circle:")


def busiest_line(loads: LayerLoads) -> str:
    """The most loaded expert at the newest step, in words."""
    if not np.isfinite(loads.load_LE).any():
        return f"No token was routed at step {loads.step:,}."
    layer, expert = np.unravel_index(np.nanargmax(loads.load_LE), loads.load_LE.shape)
    share = formats.value(float(loads.load_LE[layer, expert]), 3)
    return (
        f"Step {loads.step:,}. Busiest: expert {expert} of layer {loads.layers[layer]}, {share}×."
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What the page shows of a run's expert loads; no loads, no `at`."""

    over_steps: LoadMap
    at: LayerLoads | None
    imbalance: ImbalanceMap
    bias: LayerBias | None
    looked_at: int
    idle: list[Idle]
    problems: list[str]


def read(run: Run, layer: int | None, step: int | None) -> Found:
    """The heat maps' values and the idle experts."""
    with shell.workspace().experts(run) as loads:
        blocks, problems = loads.blocks(), loads.problems()
        at = experts.loads_at(blocks, step)
        bias = experts.bias_at(loads, at.step) if at else None
    return Found(
        experts.load_map(blocks, -1 if layer is None else layer),
        at,
        experts.imbalance_map(blocks),
        bias,
        *experts.idle_experts(blocks),
        problems,
    )


def heat_maps(found: Found, loads: LayerLoads, layer: int | None) -> None:
    """Experts over steps for one layer; layers over experts at a step; layers over steps."""
    left, right = st.columns(2, gap="medium")
    if len(found.over_steps.step_S):
        with left:
            shell.section(
                f"Layer {layer}: experts over steps",
                "1× is an even share. Look for experts that stay dark (idle) or bright (crowded).",
            )
            alt = f"Load of each expert of layer {layer} over steps"
            shell.chart(load_map_figure(found.over_steps), "load map", alt)
            shell.csv_button("load-map", lambda: experts.load_map_table(found.over_steps))
    with right:
        shell.section(f"Layers by experts, step {loads.step:,}", busiest_line(loads))
        alt = f"Load of every expert of every layer at step {loads.step}"
        shell.chart(layer_loads_figure(loads), "layer loads", alt)
        shell.csv_button("layer-loads", lambda: experts.layer_loads_table(loads))
    bias = found.bias
    if bias is not None:
        shell.section(
            f"Balancing bias, step {bias.step:,}",
            "Added to each expert's score before the choice: below 0 it turns tokens away, above 0 "
            "it calls them. Look for rows at both ends of the colours: there it fights the router.",
        )
        alt = f"Balancing bias of every expert of every layer at step {bias.step}"
        shell.chart(bias_map_figure(bias, shell.is_dark()), "bias map", alt)
        shell.csv_button("bias", lambda: experts.bias_table(bias))
    if len(found.imbalance.layers) > 1:
        shell.section(
            "Imbalance by layer over steps",
            "Busiest expert over the mean. A bright row is a layer to choose above.",
        )
        alt = "Load imbalance of every layer over steps"
        shell.chart(imbalance_map_figure(found.imbalance, 240), "imbalance map", alt)
        shell.csv_button("imbalance", lambda: experts.imbalance_table(found.imbalance))


def draw(run: Run) -> None:
    """Everything as of now."""
    layer, step = st.session_state.get("layer_choice"), st.session_state.get("at")
    found = read(run, layer, step)
    if found.at is not None:
        idle_line(found.looked_at, found.idle)
        heat_maps(found, found.at, layer)
    # After the maps are on their way: the browser draws them meanwhile.
    names = [name for panel in ROUTER_PANELS for name in panel.metrics.values()]
    rows = shell.workspace().columns.rows(run.folder, names)
    table, view = curves.table_of(rows), View(dark=shell.is_dark())
    drawings = [(panel, panel_figure(table, panel, view)) for panel in ROUTER_PANELS]
    shown = [(panel, drawing) for panel, drawing in drawings if drawing]
    if found.at is None and not shown:
        nothing(run)
    for i in range(0, len(shown), 2):
        for column, (panel, drawing) in zip(
            st.columns(2, gap="medium"), shown[i : i + 2], strict=False
        ):
            with column:
                shell.panel(panel, drawing)
    if shown:
        shell.csv_button("router curves", lambda: curves.arrow(table), "Curves as CSV")
    shell.show_problems([*found.problems, *rows.problems])


def nothing(run: Run) -> None:
    """Why there is nothing about the router."""
    if run.is_live:
        st.info("No expert loads yet. They appear here with the first recorded step.")
    else:
        st.info(
            "This run recorded no expert loads: it may have no MoE layer, or it ended too early."
        )


def choose_layer(run: Run) -> None:
    """The choices of a layer and a step, kept in the address."""
    with shell.workspace().experts(run) as loads:
        layers = experts.layers(loads.blocks())
    if len(layers) < 2:
        st.session_state["layer_choice"] = layers[0] if layers else None
        return
    asked = st.query_params.get("layer", "")
    wanted = next((layer for layer in layers if str(layer) == asked), layers[0])
    st.session_state["layer_choice"] = wanted

    def take() -> None:
        st.query_params["layer"] = str(st.session_state["layer_choice"])

    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        st.selectbox("MoE layer", layers, key="layer_choice", on_change=take, width=140)
        st.number_input(
            "Step",
            min_value=0,
            max_value=2**53 - 1,
            value=None,
            step=1,
            key="at",
            bind="query-params",
            placeholder="newest",
            width=160,
            help="For layers by experts: the newest recorded step at or before this one",
        )


def page() -> None:
    """The chosen run's router."""
    run = shell.choose_run(
        "Router",
        "How evenly tokens reach the experts. Look for layers far from 1×, and for dead experts.",
    )
    choose_layer(run)
    shell.live(draw, run)


page()
