"""What each rank's GPU does: utilisation, memory, power, temperature, clocks."""

import math
import time
from collections.abc import Callable
from functools import partial

import duckdb
import plotly.graph_objects as go
import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.figures import reading_map_figure, readings_figure
from nviz.queries import gpus
from nviz.queries.gpus import Latest
from nviz.store import Run
from nviz.store.gpus import open_gpus
from nviz.store.runs import STALLED_AFTER_S

# Reading, title, unit, what to look for.
PANELS = (
    (
        "utilisation_percent",
        "Utilisation",
        "%",
        "Share of time with a kernel running. Gaps are waiting: data, checkpoints, a slow peer.",
    ),
    (
        "memory_used_gib",
        "Memory",
        "GiB",
        "All processes together. It should be level; a rise without end is a leak.",
    ),
    ("power_w", "Power", "W", "Far below the limit at full utilisation means starved kernels."),
    (
        "temperature_c",
        "Temperature",
        "°C",
        "Above about 85 °C GPUs slow themselves down; one hot rank slows all.",
    ),
    (
        "clock_sm_mhz",
        "SM clock",
        "MHz",
        "A fall under load is throttling: look at temperature and power of the same rank.",
    ),
    ("clock_memory_mhz", "Memory clock", "MHz", "It should be constant while the run trains."),
)
# More ranks than colours are a heat map.
MOST_LINES = 8
HOT_C = 85.0
NAMED = 8
COLUMNS = {
    "rank": st.column_config.NumberColumn("Rank", width=60),
    "utilisation_percent": st.column_config.ProgressColumn(
        "Utilisation", min_value=0.0, max_value=100.0, format="%.0f %%", width=120
    ),
    "recent": st.column_config.NumberColumn("10 min mean", format="%.0f %%", width=100),
    "memory_used_gib": st.column_config.NumberColumn("Memory, GiB", format="%.1f", width=100),
    "memory_total_gib": st.column_config.NumberColumn("of GiB", format="%.1f", width=80),
    "power_w": st.column_config.NumberColumn("Power, W", format="%.0f", width=85),
    "power_limit_w": st.column_config.NumberColumn("of W", format="%.0f", width=70),
    "temperature_c": st.column_config.NumberColumn("Temperature, °C", format="%.0f", width=120),
    "clock_sm_mhz": st.column_config.NumberColumn("SM clock, MHz", format="%.0f", width=110),
    "clock_memory_mhz": st.column_config.NumberColumn("Memory clock", format="%.0f", width=110),
}


def latest_table(found: list[Latest]) -> pa.Table:
    """The newest readings, a row a rank."""
    present = [name for name in COLUMNS if any(name in item.values for item in found)]
    columns: dict[str, list[float | int | None]] = {"rank": [item.rank for item in found]}
    for name in present:
        columns[name] = [item.values.get(name) for item in found]
        if name == "utilisation_percent":
            columns["recent"] = [item.recent_utilisation for item in found]
    return pa.table(columns)


def verdict(run: Run, found: list[Latest], now_unix_s: float) -> None:
    """Names hot ranks, the least used one where it stands apart, and readings that stopped."""
    age = now_unix_s - max(item.time_unix_s for item in found)
    if run.status == "running" and age > STALLED_AFTER_S:
        st.warning(f"No new reading for {formats.duration(age)}.", icon=":material/sensors_off:")
    warm = [(item.values.get("temperature_c", 0.0), item.rank) for item in found]
    hot = sorted(
        ((heat, rank) for heat, rank in warm if heat >= HOT_C), key=lambda i: (-i[0], i[1])
    )
    if hot:
        names = ", ".join(f"{rank} ({heat:.0f} °C)" for heat, rank in hot[:NAMED])
        more = f" and {len(hot) - NAMED} more" if len(hot) > NAMED else ""
        st.warning(f"Hot: rank {names}{more}.", icon=":material/device_thermostat:")
    used = [(item.recent_utilisation, item.rank) for item in found if item.recent_utilisation]
    if len(used) > 1 and min(used)[0] < 0.8 * max(used)[0]:
        low, rank = min(used)
        st.warning(
            f"Least used: rank {rank}, {low:.0f} % over the last ten minutes, where the busiest "
            f"has {max(used)[0]:.0f} %.",
            icon=":material/warning:",
        )


def tiles(found: list[Latest]) -> None:
    """The GPUs together, as they were at their newest readings."""
    power = [item.values["power_w"] for item in found if "power_w" in item.values]
    hottest = max((item.values.get("temperature_c", -math.inf) for item in found), default=0.0)
    used = [item.recent_utilisation for item in found if item.recent_utilisation is not None]
    fill = [
        item.values["memory_used_gib"] / item.values["memory_total_gib"]
        for item in found
        if item.values.get("memory_total_gib") and "memory_used_gib" in item.values
    ]
    facts = {
        "GPUs": formats.count(len(found)),
        "Utilisation, 10 min": f"{sum(used) / len(used):.0f} %" if used else "–",
        "Fullest memory": f"{100 * max(fill):.0f} %" if fill else "–",
        "Power, all": f"{formats.short(sum(power))} W" if power else "–",
        "Hottest": f"{hottest:.0f} °C" if math.isfinite(hottest) else "–",
    }
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def charts(connection: duckdb.DuckDBPyConnection, ranks: list[int], names: list[str]) -> None:
    """A chart of each reading, two in a row: lines for a few ranks, a heat map for many."""
    shown = [panel for panel in PANELS if panel[0] in names]
    for i in range(0, len(shown), 2):
        for column, (name, title, unit, line) in zip(
            st.columns(2, gap="medium"), shown[i : i + 2], strict=False
        ):
            with column:
                shell.section(title, line)
                figure, table = drawn(connection, len(ranks), name, unit)
                shell.chart(figure, f"gpu {title}", f"{title} of each rank's GPU over time")
                shell.csv_button(f"gpu {title}", table)


def drawn(
    connection: duckdb.DuckDBPyConnection, ranks: int, name: str, unit: str
) -> tuple[go.Figure, Callable[[], pa.Table]]:
    """The chart of a reading, and what makes a table of the values in it."""
    if ranks > MOST_LINES:
        means = gpus.reading_map(connection, name)
        return reading_map_figure(means, unit), partial(gpus.map_arrow, means, name)
    found = gpus.readings(connection, name)
    figure = readings_figure(found, unit, shell.is_dark())
    return figure, partial(gpus.readings_arrow, found, name)


def show(run: Run, connection: duckdb.DuckDBPyConnection) -> None:
    """Newest readings, verdict and charts."""
    ranks, names = gpus.span(connection)
    if not names:
        nothing(run, [])
        return
    found = gpus.latest(connection, names)
    tiles(found)
    # In a place of its own, so that a new line moves no chart to another place, drawn anew.
    with st.container():
        verdict(run, found, time.time())
    charts(connection, ranks, names)
    shell.section("Newest readings", "A row a rank. Times below the charts are in UTC.")
    table = latest_table(found)
    st.dataframe(
        table,
        column_config=COLUMNS,
        hide_index=True,
        height=min(320, 38 + 35 * table.num_rows),
        key="gpus",
    )
    shell.csv_button("gpus", lambda: table)


def draw(run: Run) -> None:
    """Everything as of now."""
    connection, problems = open_gpus(run.folder)
    shell.status_line(run, [run.key, *([f"on {run.device}"] if run.device else [])])
    if connection is None:
        nothing(run, problems)
        return
    try:
        with connection:
            show(run, connection)
    except duckdb.Error as error:
        problems.append(f"gpu.parquet: {str(error).splitlines()[0][:160]}")
    shell.show_problems(problems)


def nothing(run: Run, problems: list[str]) -> None:
    """Why there are no readings."""
    if problems:
        st.warning("The GPU readings cannot be read. They may be written again soon.")
        shell.show_problems(problems)
    elif run.device and run.device.startswith("cpu"):
        st.info("This run trains on the CPU: there is no GPU to look at.")
    elif run.is_live:
        st.info("No reading yet. The first ones appear here by themselves.")
    else:
        st.info("This run recorded no GPU readings: NVML was not there, or it ended too early.")


def page() -> None:
    """The chosen run's GPUs."""
    run = shell.choose_run(
        "GPUs", "What each GPU does. Look for one that is hotter, slower or less used than others."
    )
    shell.live(draw, run)


page()
