"""One run's curves: loss, speed, gradient norm, learning rates, step time; live while it trains."""

import time
from dataclasses import dataclass

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.charts import Drawing, Panel, View, add_baseline, panel_figure
from nviz.panels import LOSS, RUN_PANELS
from nviz.queries import curves
from nviz.queries.curves import AXIS_COLUMNS, Axis, Table
from nviz.store import Event, Run

SHOWN = ("loss/train", "loss/validation", "tokens_per_s", "step_ms", "mfu", "tokens")
SMOOTHING = {"Off": 0.0, "0.6": 0.6, "0.9": 0.9, "0.98": 0.98}
AXES: dict[str, Axis] = {"Step": "step", "Tokens": "tokens", "Time": "time"}
AXES_OF = tuple(name for name in AXIS_COLUMNS.values() if name != "step")


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
        "Step": f"{formats.count(shown)} / {_few_signs(run.steps)}",
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


def _few_signs(count: int | None) -> str:
    """A whole number that fits beside another one."""
    return formats.short(count) if count is not None and count >= 1e5 else formats.count(count)


def facts(run: Run) -> list[str]:
    """What stands behind the status."""
    found = [run.key, f"attempt {run.attempt}"]
    if run.device:
        found.append(f"on {run.device}")
    if run.tags:
        found.append(f"tags {', '.join(run.tags)}")
    return found


def show(panel: Panel, drawing: Drawing, baseline: float | None = None) -> None:
    """A panel with its title, its line and its figure."""
    if baseline is not None:
        add_baseline(drawing.figure, baseline, "unigram baseline")
    shell.panel(panel, drawing)


@dataclass(frozen=True, slots=True)
class Found:
    """What the page shows of a run's files."""

    drawings: dict[str, Drawing]
    latest: dict[str, float]
    step: int | None
    events: list[Event]
    table: Table
    problems: tuple[str, ...]


def read(run: Run, view: View) -> Found:
    """All that the page needs of the run's files."""
    space = shell.workspace()
    panels = (LOSS, *RUN_PANELS)
    metrics = {name for panel in panels for name in panel.metrics.values()} | {*SHOWN, *AXES_OF}
    rows = space.columns.rows(run.folder, sorted(metrics))
    happened = space.events(run)
    losses = curves.evaluations(happened)
    found = curves.with_evaluations(curves.table_of(rows, view.axis), losses, view.axis)
    drawings = {panel.title: panel_figure(found, panel, view) for panel in panels}
    latest = curves.latest_of(found, SHOWN)
    if losses:
        latest[curves.VALIDATION] = losses[max(losses)]
    return Found(
        {title: drawing for title, drawing in drawings.items() if drawing},
        latest,
        curves.last_step_of(rows),
        happened,
        found,
        rows.problems,
    )


def events_table(happened: list[Event]) -> pa.Table:
    """The newest 200 events, the newest first."""
    return formats.table(
        ["time", "event", "step", "detail"],
        [
            (formats.moment(item.time_unix_s), item.event, item.step, item.detail_text)
            for item in happened[:-201:-1]
        ],
    )


def draw(run: Run, view: View) -> None:
    """Status, newest values and curves as of now."""
    found = read(run, view)
    shell.status_line(run, facts(run))
    shell.alert_lines(run)
    tiles(run, found.latest, found.step)
    if not found.drawings:
        nothing(run, view, recorded=found.step is not None)
    else:
        charts(run, found.drawings)
        shell.csv_button("curves", lambda: curves.arrow(found.table), "Curves as CSV")
    if found.events:
        happened = events_table(found.events)
        shell.section("Events", "Starts, checkpoints, evaluations and faults, the newest first.")
        st.dataframe(
            happened,
            column_config=EVENT_COLUMNS,
            hide_index=True,
            height=min(220, 38 + 35 * happened.num_rows),
            key="events",
        )
    shell.show_problems(list(found.problems))


def charts(run: Run, drawings: dict[str, Drawing]) -> None:
    """Loss over the full width, the other panels two in a row."""
    if LOSS.title in drawings:
        show(LOSS, drawings[LOSS.title], run.results.get("loss/unigram"))
    rest = [panel for panel in RUN_PANELS if panel.title in drawings]
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
        "How training goes. Look for a loss that falls and stays finite, and a level step time.",
    )
    view = controls(run)
    shell.live(lambda found: draw(found, view), run)


page()
