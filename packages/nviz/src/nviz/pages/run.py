"""One run's curves: loss, speed, gradient norm, learning rates, step time; live while it trains."""

import time

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.charts import Drawing, Panel, View, add_baseline, panel_figure
from nviz.queries import curves
from nviz.queries.curves import Axis
from nviz.store import Run, RunData

LOSS = Panel(
    "Loss",
    "Nats per token. It should fall and flatten, with validation close to training; "
    "crosses mark NaN or infinity.",
    {"training": "loss/train", "validation": "loss/validation"},
    unit="nats per token",
    points=frozenset({"validation"}),
    log=True,
    height=330,
)
PANELS = (
    Panel(
        "Tokens per second",
        "Training speed. Look for drops: slow data, a checkpoint, a slow rank.",
        {"tokens per second": "tokens_per_s"},
        unit="tokens/s",
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Spikes announce a loss spike; a steady rise is a warning.",
        {"gradient norm": "grad_norm"},
        log=True,
    ),
    Panel(
        "Learning rates",
        "Warm-up, plateau and decay as planned, for each group of weights.",
        {"dense": "lr/dense", "router": "lr/router", "expert": "lr/expert"},
    ),
    Panel(
        "Step time",
        "Where a step's milliseconds go. The parts should be level; data should be near 0.",
        {
            "whole step": "step_ms",
            "data": "time_ms/data",
            "forward": "time_ms/forward",
            "backward": "time_ms/backward",
            "optimizer": "time_ms/optimizer",
        },
        unit="ms",
    ),
    Panel(
        "Loss terms",
        "Means, before their coefficients. Balance rises with uneven load, z-loss with growing "
        "router logits.",
        {
            "cross-entropy": "loss/ce",
            "balance, unscaled": "loss/balance",
            "z-loss, unscaled": "loss/z",
        },
        log=True,
    ),
    Panel(
        "Memory",
        "Peak close to the device's size risks running out.",
        {
            "peak": "memory/peak_gib",
            "reserved": "memory/reserved_gib",
            "allocated": "memory/allocated_gib",
        },
        unit="GiB",
    ),
)
SHOWN = ("loss/train", "loss/validation", "tokens_per_s", "step_ms", "mfu", "tokens")
SMOOTHING = {"Off": 0.0, "0.6": 0.6, "0.9": 0.9, "0.98": 0.98}
AXES: dict[str, Axis] = {"Step": "step", "Tokens": "tokens", "Time": "time"}


EVENT_COLUMNS = {
    "time": st.column_config.DatetimeColumn("Time", format="YYYY-MM-DD HH:mm:ss", width=160),
    "event": st.column_config.TextColumn("Event", width=120),
    "step": st.column_config.NumberColumn("Step", format="localized", width=90),
    "detail": st.column_config.TextColumn("Detail", width="large"),
}


def controls(run: Run) -> View:
    """The row of controls; their values live in the address."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        axis = st.segmented_control(
            "Horizontal axis",
            list(AXES),
            default="Step",
            required=True,
            key="x",
            bind="query-params",
        )
        smoothing = st.segmented_control(
            "Smoothing",
            list(SMOOTHING),
            default="Off",
            required=True,
            key="smooth",
            bind="query-params",
            help="Weight of the moving average; the raw curve stays behind it, pale",
        )
        log = st.toggle("Log scale", key="log", bind="query-params")
        earlier = False
        if run.attempt > 1:
            earlier = st.toggle(
                "Earlier attempts",
                key="earlier",
                bind="query-params",
                help="Also draw, dotted, the steps that a later attempt did again",
            )
    return View(
        AXES[axis or "Step"], SMOOTHING[smoothing or "Off"], log, earlier, dark=shell.is_dark()
    )


def tiles(run: Run, latest: dict[str, float], step: int | None) -> None:
    """The newest values."""
    shown = step if step is not None else run.step
    validation = run.results.get("loss/validation", latest.get("loss/validation"))
    facts = {
        "Step": f"{formats.count(shown)} / {formats.count(run.steps)}",
        "Training loss": formats.value(latest.get("loss/train")),
        "Validation loss": formats.value(validation),
        "Tokens/s": formats.short(latest.get("tokens_per_s")),
        "Step time": f"{formats.value(latest.get('step_ms'), 3)} ms"
        if "step_ms" in latest
        else "–",
        "Tokens": formats.short(latest.get("tokens")),
        "Duration": formats.duration(run.duration_s(time.time())),
    }
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def facts(run: Run) -> list[str]:
    """What stands behind the status."""
    found = [run.key, f"attempt {run.attempt}"]
    if run.device:
        found.append(f"on {run.device}")
    if run.tags:
        found.append(f"tags {', '.join(run.tags)}")
    return found


def bad_line(drawing: Drawing) -> None:
    """How many values were not finite, and where the first ones were."""
    if not drawing.bad:
        return
    first = ", ".join(f"{label} {word} at step {step:,}" for label, word, step in drawing.bad[:3])
    more = f" and {len(drawing.bad) - 3} more" if len(drawing.bad) > 3 else ""
    count = len(drawing.bad)
    st.markdown(
        f":orange[{count} non-finite value{'s' if count > 1 else ''}]: "
        f"{formats.escaped(first)}{more}"
    )


def show(panel: Panel, drawing: Drawing, baseline: float | None = None) -> None:
    """A panel with its title, its line and its figure."""
    shell.section(panel.title, panel.line)
    if baseline is not None:
        add_baseline(drawing.figure, baseline, "unigram baseline")
    st.plotly_chart(
        drawing.figure, key=f"chart {panel.title}", config={"displaylogo": False}, alt=panel.title
    )
    bad_line(drawing)


def read(
    data: RunData, view: View, rank: int
) -> tuple[dict[str, Drawing], dict[str, float], int | None]:
    """All that the page needs of the run's tables, read in one go."""
    panels = (LOSS, *PANELS)
    metrics = [name for panel in panels for name in panel.metrics.values()]
    losses = curves.evaluations(data.connection)
    found = curves.table(data.connection, metrics, rank, view.axis, data.metrics)
    found = curves.with_evaluations(found, losses, view.axis)
    drawings = {panel.title: panel_figure(found, panel, view) for panel in panels}
    present = [name for name in SHOWN if name in data.metrics]
    latest = curves.latest(data.connection, rank, present)
    if losses:
        latest.setdefault(curves.VALIDATION, losses[max(losses)])
    return (
        {title: drawing for title, drawing in drawings.items() if drawing},
        latest,
        curves.last_step(data.connection),
    )


def events(data: RunData) -> pa.Table:
    """The newest 200 events, the newest first."""
    rows = data.connection.execute(
        "SELECT time_unix_s, event, step, detail FROM events ORDER BY seq DESC LIMIT 200"
    ).fetchall()
    return formats.table(
        ["time", "event", "step", "detail"],
        [
            (formats.moment(when), event, step, "" if detail == "{}" else detail)
            for when, event, step, detail in rows
        ],
    )


def draw(run: Run, view: View) -> None:
    """Status, newest values and curves as of now."""
    with shell.workspace().data(run) as data:
        ranks = curves.ranks(data.connection)
        drawings, latest, step = read(data, view, ranks[0] if ranks else 0)
        happened, problems = events(data), data.problems()
    shell.status_line(run, facts(run))
    tiles(run, latest, step)
    if not drawings:
        nothing(run, view, recorded=step is not None)
    else:
        charts(run, drawings)
    if happened.num_rows:
        shell.section("Events", "Starts, checkpoints, evaluations and faults, the newest first.")
        st.dataframe(
            happened,
            column_config=EVENT_COLUMNS,
            hide_index=True,
            height=min(220, 38 + 35 * happened.num_rows),
            key="events",
        )
    shell.show_problems(problems)


def charts(run: Run, drawings: dict[str, Drawing]) -> None:
    """Loss over the full width, the other panels two in a row."""
    if LOSS.title in drawings:
        show(LOSS, drawings[LOSS.title], run.results.get("loss/unigram"))
    rest = [panel for panel in PANELS if panel.title in drawings]
    for i in range(0, len(rest), 2):
        for column, panel in zip(st.columns(2, gap="medium"), rest[i : i + 2], strict=False):
            with column:
                show(panel, drawings[panel.title])


def nothing(run: Run, view: View, recorded: bool) -> None:
    """Why there are no curves."""
    if recorded and view.axis != "step":
        st.info("This run did not record what this axis needs. Choose the axis Step.")
    elif run.is_live:
        st.info("No step yet. The first one appears here by itself; compiling can take a minute.")
    else:
        st.info("This run ended before its first step. Its events and configuration may say why.")


def page() -> None:
    """The chosen run."""
    run = shell.choose_run(
        None,
        "How training goes: losses, speed and step time. It refreshes itself while it trains.",
    )
    view = controls(run)
    shell.live(lambda found: draw(found, view), run)


page()
