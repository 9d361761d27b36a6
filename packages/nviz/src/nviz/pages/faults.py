"""What happened to a run, and what it cost: starts, checkpoints, faults, recoveries over time."""

import time

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.figures import time_line_figure
from nviz.queries import faults
from nviz.queries.faults import LANE_ORDER, History, Losses, Moment
from nviz.store import Run

KINDS = ("All", *LANE_ORDER)
MOST_ROWS = 1000
ATTEMPT_COLUMNS = {
    "attempt": st.column_config.NumberColumn("Attempt", width=75),
    "started": st.column_config.DatetimeColumn("Started", format="YYYY-MM-DD HH:mm:ss", width=160),
    "from step": st.column_config.NumberColumn("From step", format="localized", width=90),
    "reached": st.column_config.NumberColumn("Reached step", format="localized", width=110),
    "duration": st.column_config.TextColumn("Duration", width=110),
    "ended": st.column_config.TextColumn("Ended", width=110),
    "steps lost": st.column_config.NumberColumn("Steps lost", format="localized", width=90),
}
EVENT_COLUMNS = {
    "time": st.column_config.DatetimeColumn("Time, UTC", format="YYYY-MM-DD HH:mm:ss", width=160),
    "kind": st.column_config.TextColumn("Kind", width=110),
    "step": st.column_config.NumberColumn("Step", format="localized", width=90),
    "what": st.column_config.TextColumn("What", width="large"),
}


def tiles(run: Run, attempts: list[History], lost: Losses, counts: dict[str, int]) -> None:
    """What the faults cost, in short."""
    again = lost.restarts + lost.recoveries
    done = max((item.reached or 0 for item in attempts), default=0)
    slowest = max(lost.seconds, default=None)
    facts = {
        "Attempts": formats.count(max(len(attempts), run.attempt)),
        "Faults": formats.count(counts.get("fault", 0)),
        "Recoveries": formats.count(counts.get("recovery", 0)),
        "Steps lost": formats.count(again),
        "Of all steps": f"{100 * again / (done + again):.1f} %" if done else "–",
        "Longest recovery": formats.duration(slowest),
    }
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def attempt_table(attempts: list[History], now_unix_s: float) -> pa.Table:
    """The attempts, the newest first."""
    rows = []
    for item in reversed(attempts):
        end = now_unix_s if item.ended == "running" else item.last_unix_s
        known = item.started_unix_s is not None and end is not None
        rows.append(
            (
                item.attempt,
                formats.moment(item.started_unix_s),
                item.from_step,
                item.reached,
                formats.duration(max(0.0, end - item.started_unix_s)) if known else "–",  # type: ignore[operator]  # both are known
                item.ended,
                item.lost,
            )
        )
    return formats.table(list(ATTEMPT_COLUMNS), rows)


def event_table(found: list[Moment]) -> pa.Table:
    """Events as rows, the newest first."""
    rows = [
        (formats.moment(item.time_unix_s), item.lane, item.step, item.words)
        for item in reversed(found[-MOST_ROWS:])
    ]
    return formats.table(list(EVENT_COLUMNS), rows)


def draw(run: Run) -> None:
    """Everything as of now."""
    space = shell.workspace()
    rows = space.columns.rows(run.folder, [faults.TIME])
    recorded = space.events(run)
    counts = faults.lane_counts(recorded)
    attempts = faults.histories(run, recorded, rows)
    lost = faults.losses(recorded, attempts)
    moments = faults.moments(recorded)
    progress = faults.progress(rows)
    shell.status_line(run, [run.key, f"attempt {run.attempt}"])
    # In a place of its own, so that a new line moves no chart to another place, drawn anew.
    with st.container():
        shell.alert_lines(run)
    if not counts and not attempts:
        nothing(run)
        return
    tiles(run, attempts, lost, counts)
    shell.section(
        "Time line",
        "Above, steps over time: a line that falls back did steps again. Below, each event in its "
        "lane; point at one to read it. Times are in UTC.",
    )
    shell.chart(
        time_line_figure(progress, moments, counts, shell.is_dark()), "time line", "Time line"
    )
    if attempts:
        shell.section(
            "Attempts", "Each start of the run. Steps lost are those that the next one did again."
        )
        table = attempt_table(attempts, time.time())
        st.dataframe(
            table,
            column_config=ATTEMPT_COLUMNS,
            hide_index=True,
            height=min(250, 38 + 35 * table.num_rows),
            placeholder="–",
            key="attempts",
        )
    events(moments, counts)
    shell.show_problems([*rows.problems, *space.event_problems(run)])


def events(moments: list[Moment], counts: dict[str, int]) -> None:
    """The events of the chosen kind in a table."""
    if not counts:
        return
    kind = st.session_state.get("kind") or KINDS[0]
    chosen = [item for item in moments if kind in (KINDS[0], item.lane)]
    total = sum(counts.values()) if kind == KINDS[0] else counts.get(kind, 0)
    shown = min(len(chosen), MOST_ROWS)
    thinned = f", {shown:,} of {total:,}, evenly thinned" if shown < total else ""
    shell.section("Events", f"The newest first{thinned}. Choose a kind above.")
    if not chosen:
        st.info("The run has no event of this kind.")
        return
    table = event_table(chosen)
    st.dataframe(
        table,
        column_config=EVENT_COLUMNS,
        hide_index=True,
        height=min(320, 38 + 35 * table.num_rows),
        placeholder="–",
        key="fault events",
    )
    shell.csv_button("events", lambda: table)


def nothing(run: Run) -> None:
    """Why there is no time line."""
    if run.is_live:
        st.info("Nothing happened yet. The first event appears here by itself.")
    else:
        st.info("This run recorded no event: events.jsonl is not there or holds none.")


def page() -> None:
    """The chosen run's time line."""
    run = shell.choose_run(
        "Faults",
        "What happened and what it cost. Look for faults that repeat, and for steps done again.",
    )
    st.segmented_control(
        "Events", KINDS, default=KINDS[0], required=True, key="kind", bind="query-params"
    )
    shell.live(draw, run)


page()
