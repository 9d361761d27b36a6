"""All runs in a table: status, progress, losses, rate, a small loss curve. A click opens one."""

import time
from typing import Any

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.store import Run, Summary

COLUMNS: dict[str, Any] = {
    "run": st.column_config.TextColumn("Run", width=180, help="Name; click to open"),
    "status": st.column_config.TextColumn("Status", width=115),
    "step": st.column_config.NumberColumn("Step", format="localized", width=80),
    "progress": st.column_config.ProgressColumn(
        "Progress", min_value=0.0, max_value=100.0, format="%.0f %%", width=110
    ),
    "loss": st.column_config.TextColumn("Loss", help="Last training loss", width=80),
    "validation": st.column_config.TextColumn("Validation", help="Last validation loss", width=90),
    "rate": st.column_config.TextColumn("Tokens/s", width=80),
    "started": st.column_config.DatetimeColumn("Started", format="distance", width=115),
    "duration": st.column_config.TextColumn("Duration", width=100),
    "curve": st.column_config.LineChartColumn("Loss curve", width=120),
    "tags": st.column_config.ListColumn("Tags", width="small"),
}


# Names in the session: the table, and the keys of the runs in its rows.
TABLE, LISTED = "runs_table", "runs_listed"


def matches(run: Run, words: str) -> bool:
    """Whether every word is in the run's name, key, status, group or tags."""
    text = " ".join([run.name, run.key, run.status, run.group or "", *run.tags]).lower()
    return all(word in text for word in words.lower().split())


def row(run: Run, summary: Summary, now_unix_s: float) -> dict[str, Any]:
    """The run's line in the table."""
    step = summary.step if summary.step is not None else run.step
    return {
        "run": run.name,
        "status": formats.status(run.status),
        "step": step,
        "progress": min(100.0, 100 * step / run.steps) if step is not None and run.steps else None,
        "loss": formats.value(summary.loss),
        "validation": formats.value(summary.validation),
        "rate": formats.short(summary.tokens_per_s),
        "started": formats.moment(run.started_unix_s),
        "duration": formats.duration(run.duration_s(now_unix_s)),
        "curve": list(summary.spark),
        "tags": list(run.tags),
    }


def tiles(runs: list[Run]) -> None:
    """How many runs there are, by status."""
    counts = {name: sum(run.status == name for run in runs) for name in formats.SYMBOLS}
    with st.container(horizontal=True, gap="small"):
        for name, count in counts.items():
            if count:
                st.badge(f"{count} {name}", color=shell.BADGE_COLOURS[name])  # type: ignore[arg-type]  # a Literal of colours


def table(runs: list[Run]) -> None:
    """The table; a click on a cell opens its run."""
    space, now = shell.workspace(), time.time()
    rows = [row(run, space.summary(run), now) for run in runs]
    shown = [name for name in COLUMNS if name != "tags" or any(run.tags for run in runs)]
    frame = pa.table({name: [line[name] for line in rows] for name in shown})
    st.session_state[LISTED] = [run.key for run in runs]
    st.dataframe(
        frame,
        column_config=COLUMNS,
        hide_index=True,
        on_select="rerun",
        selection_mode="single-cell",
        placeholder="–",
        height=min(620, 38 + 35 * max(1, len(runs))),
        key=TABLE,
    )


def open_what_was_clicked() -> None:
    """Goes to the run whose cell was clicked since the table was drawn.

    Called before anything else is drawn: a timed refresh of this page that comes between the click
    and the change of page would leave the new page empty, so as little as can be lies between.
    """
    clicked = st.session_state.get(TABLE)
    cells = clicked["selection"]["cells"] if clicked else []
    listed = st.session_state.get(LISTED, [])
    if cells and cells[0][0] < len(listed):
        run = listed[cells[0][0]]
        # Forgotten, so that coming back to the list does not open it again.
        del st.session_state[TABLE]
        st.switch_page(shell.PAGES / "run.py", query_params={"run": run})


def problems(runs: list[Run]) -> None:
    """Why runs are unreadable."""
    for run in runs:
        if run.problem:
            st.warning(f"{formats.escaped(run.key)}: {formats.escaped(run.problem)}")


def draw() -> None:
    """The list below the search field, as of now."""
    open_what_was_clicked()
    space = shell.workspace()
    runs = list(space.runs().values())
    if not runs:
        shell.empty_root(space.root)
        return
    tiles(runs)
    found = [run for run in runs if matches(run, st.session_state.get("q") or "")]
    if not found:
        st.info("No run matches the search. Try fewer words, or a status such as `failed`.")
        return
    table(found)
    problems(found)


def page() -> None:
    """Search field and list, refreshed every few seconds."""
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        shell.header(
            "Runs",
            "All training runs, the newest first. Click one to see its curves and its router.",
        )
    with right:
        st.text_input(
            "Search",
            key="q",
            bind="query-params",
            placeholder="Search name, tag, group or status",
            label_visibility="collapsed",
            icon=":material/search:",
        )
    st.fragment(draw, run_every=2 * shell.REFRESH_S)()


page()
