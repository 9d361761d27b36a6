"""The router's health: load of each expert over time and by layer, imbalance, idle experts."""

import numpy as np
import streamlit as st

from nviz import formats, shell
from nviz.charts import Panel, View, layer_loads_figure, load_map_figure, panel_figure
from nviz.queries import curves, experts
from nviz.queries.experts import Idle, LayerLoads, LoadMap
from nviz.store import Run, RunData

PANELS = (
    Panel(
        "Load imbalance",
        "Busiest expert over the mean. 1 is even; above 2, the slowest rank waits for one expert.",
        {"imbalance": "router/load_imbalance"},
        unit="max / mean",
    ),
    Panel(
        "Router entropy",
        "How undecided the router is. A fall to 0 means that few experts get everything.",
        {"entropy": "router/entropy"},
        unit="nats",
    ),
    Panel(
        "Bias range",
        "Spread of the balancing bias. A steady rise means that it fights the router.",
        {"bias range": "router/bias_range"},
    ),
    Panel(
        "Dropped tokens",
        "Rows beyond an expert's capacity. It should be 0 unless a capacity is set.",
        {"dropped": "router/dropped"},
    ),
)

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


def read(data: RunData, layer: int | None) -> tuple[LoadMap | None, LayerLoads | None]:
    """The two heat maps' values."""
    loads = experts.last_loads(data.connection)
    found = experts.load_map(data.connection, layer) if layer is not None else None
    return found, loads


def heat_maps(found: LoadMap | None, loads: LayerLoads | None, layer: int | None) -> None:
    """Experts over steps for one layer, and layers over experts at the newest step."""
    left, right = st.columns(2, gap="medium")
    if found is not None and len(found.step_S):
        with left:
            shell.section(
                f"Layer {layer}: experts over steps",
                "1× is an even share. Look for experts that stay dark (idle) or bright (crowded).",
            )
            st.plotly_chart(
                load_map_figure(found),
                key="load map",
                config={"displaylogo": False},
                alt=f"Load of each expert of layer {layer} over steps",
            )
    if loads is not None:
        with right:
            shell.section("Layers by experts, newest step", busiest_line(loads))
            st.plotly_chart(
                layer_loads_figure(loads),
                key="layer loads",
                config={"displaylogo": False},
                alt="Load of every expert of every layer at the newest step",
            )


def draw(run: Run) -> None:
    """Everything as of now."""
    layer = st.session_state.get("layer_choice")
    with shell.workspace().data(run) as data:
        found, loads = read(data, layer)
        looked_at, idle = experts.idle_experts(data.connection)
        ranks = curves.ranks(data.connection)
        names = [name for panel in PANELS for name in panel.metrics.values()]
        table = curves.table(data.connection, names, min(ranks, default=0), "step", data.metrics)
        problems = data.problems()
    drawings = [(panel, panel_figure(table, panel, View(dark=shell.is_dark()))) for panel in PANELS]
    shown = [(panel, drawing) for panel, drawing in drawings if drawing]
    if loads is None and not shown:
        nothing(run)
    if loads is not None:
        idle_line(looked_at, idle)
        heat_maps(found, loads, layer)
    for i in range(0, len(shown), 2):
        for column, (panel, drawing) in zip(
            st.columns(2, gap="medium"), shown[i : i + 2], strict=False
        ):
            with column:
                shell.section(panel.title, panel.line)
                st.plotly_chart(drawing.figure, key=f"chart {panel.title}", alt=panel.title)
    shell.show_problems(problems)


def nothing(run: Run) -> None:
    """Why there is nothing about the router."""
    if run.is_live:
        st.info("No expert loads yet. They appear here with the first recorded step.")
    else:
        st.info(
            "This run recorded no expert loads: it may have no MoE layer, or it ended too early."
        )


def choose_layer(run: Run) -> None:
    """The choice of a layer, kept in the address."""
    with shell.workspace().data(run) as data:
        layers = experts.layers(data.connection)
    if len(layers) < 2:
        st.session_state["layer_choice"] = layers[0] if layers else None
        return
    asked = st.query_params.get("layer", "")
    wanted = int(asked) if asked.isdecimal() and int(asked) in layers else layers[0]
    st.session_state["layer_choice"] = wanted

    def take() -> None:
        st.query_params["layer"] = str(st.session_state["layer_choice"])

    st.selectbox("MoE layer", layers, key="layer_choice", on_change=take, width=140)


def page() -> None:
    """The chosen run's router."""
    run = shell.choose_run(
        "Router", "How evenly tokens reach the experts, layer by layer. Dead experts are named."
    )
    choose_layer(run)
    shell.live(draw, run)


page()
