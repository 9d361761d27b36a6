"""All runs in a table: status, progress, losses, rate, a small loss curve. A click opens one."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.store import Run, Summary

# How long a drawing of the list waits for lines that are not made yet.
WAIT_S = 0.6
MOST_COMPARED = 50
COLUMNS: dict[str, Any] = {
    "run": st.column_config.TextColumn("Run", width=230, help="Name; click to open"),
    "status": st.column_config.TextColumn("Status", width=115),
    "alerts": st.column_config.ListColumn("Alerts", width=110, help="Rules that it breaks"),
    "curve": st.column_config.LineChartColumn("Loss curve", width=110),
    "loss": st.column_config.NumberColumn(
        "Loss", format="%.4f", help="Last training loss", width=75
    ),
    "validation": st.column_config.NumberColumn(
        "Validation", format="%.4f", help="Last validation loss", width=85
    ),
    "step": st.column_config.NumberColumn("Step", format="localized", width=80),
    "progress": st.column_config.ProgressColumn(
        "Progress", min_value=0.0, max_value=100.0, format="%.0f %%", width=110
    ),
    "rate": st.column_config.NumberColumn("Tokens/s", format="compact", width=80),
    "started": st.column_config.DatetimeColumn("Started", format="distance", width=115),
    "duration": st.column_config.TextColumn("Duration", width=100),
    "tags": st.column_config.ListColumn("Tags", width="small"),
    "group": st.column_config.TextColumn("Group", width=120),
}
OPTIONAL = ("alerts", "tags", "group")
Line = tuple[Run, Summary]
SORTS: dict[str, tuple[Callable[[Line], Any], bool]] = {
    "Newest first": (lambda line: line[0].started_unix_s or 0.0, True),
    "Name": (lambda line: line[0].name.lower(), False),
    "Lowest loss": (lambda line: _rising(line[1].loss), False),
    "Lowest validation loss": (lambda line: _rising(line[1].validation), False),
    "Fastest": (lambda line: -_rising(line[1].tokens_per_s, -1.0), True),
    "Most steps": (lambda line: line[1].step or line[0].step or 0, True),
    "Status": (lambda line: list(formats.SYMBOLS).index(line[0].status), False),
}

# Names in the session: the table, and the keys of the runs in its rows.
TABLE, LISTED = "runs_table", "runs_listed"


def _rising(value: float | None, sign: float = 1.0) -> float:
    """A value to sort by; what is missing or not a number comes last."""
    return sign * value if value is not None and not math.isnan(value) else math.inf


def row(run: Run, summary: Summary, alerts: Sequence[str], now_unix_s: float) -> dict[str, Any]:
    """The run's line in the table."""
    step = summary.step if summary.step is not None else run.step
    return {
        "run": run.name,
        "status": formats.status(run.status),
        "alerts": list(alerts),
        "step": step,
        "progress": min(100.0, 100 * step / run.steps) if step is not None and run.steps else None,
        "loss": summary.loss,
        "validation": summary.validation,
        "rate": summary.tokens_per_s,
        "started": formats.moment(run.started_unix_s),
        "duration": formats.duration(run.duration_s(now_unix_s)),
        "curve": list(summary.spark),
        "tags": list(run.tags),
        "group": run.group,
    }


def tiles(runs: Sequence[Run]) -> None:
    """How many runs there are, by status."""
    counts = {name: sum(run.status == name for run in runs) for name in formats.SYMBOLS}
    with st.container(horizontal=True, gap="small"):
        for name, count in counts.items():
            if count:
                st.badge(f"{count:,} {name}", color=shell.BADGE_COLOURS[name])  # type: ignore[arg-type]  # a Literal of colours


def table(runs: Sequence[Run]) -> None:
    """The table; a click on a cell opens its run, marked rows can be compared."""
    space, now = shell.workspace(), time.time()
    known = space.summaries(runs, WAIT_S)
    alerts = shell.alerts_of(runs, known)
    key, falling = SORTS[st.session_state.get("sort") or next(iter(SORTS))]
    lines = [(run, known.get(run.key, Summary())) for run in runs]
    lines.sort(key=key, reverse=falling)
    rows = [row(run, summary, alerts.get(run.key, ()), now) for run, summary in lines]
    shown = [name for name in COLUMNS if name not in OPTIONAL or any(line[name] for line in rows)]
    frame = pa.table({name: [line[name] for line in rows] for name in shown})
    st.session_state[LISTED] = [run.key for run, _ in lines]
    st.dataframe(
        frame,
        column_config=COLUMNS,
        hide_index=True,
        on_select="rerun",
        selection_mode=["single-cell", "multi-row"],
        placeholder="–",
        height=min(620, 38 + 35 * max(1, len(runs))),
        key=TABLE,
    )
    waiting = len(runs) - len(known)
    if waiting:
        st.caption(f"The lines of {waiting:,} more runs are being read and appear by themselves.")


def open_what_was_clicked() -> None:
    """Goes to the run whose cell was clicked since the table was drawn.

    Called before anything else is drawn: a timed refresh of this page that comes between the click
    and the change of page would leave the new page empty, so as little as can be lies between.
    """
    cells = _selected("cells")
    listed = st.session_state.get(LISTED, [])
    if cells and cells[0][0] < len(listed):
        run = listed[cells[0][0]]
        # Forgotten, so that coming back to the list does not open it again.
        del st.session_state[TABLE]
        st.switch_page(shell.PAGES / "run.py", query_params={"run": run})


def _selected(kind: str) -> list[Any]:
    clicked = st.session_state.get(TABLE)
    return list(clicked["selection"].get(kind, [])) if clicked else []


def compare_button() -> None:
    """Goes to the comparison of the rows that are marked."""
    listed = st.session_state.get(LISTED, [])
    marked = [listed[at] for at in _selected("rows") if at < len(listed)][:MOST_COMPARED]
    label = f"Compare {len(marked)} runs" if marked else "Mark rows to compare them"
    if st.button(
        label, disabled=not marked, icon=":material/compare_arrows:", shortcut="M", key="compare"
    ):
        st.switch_page(shell.PAGES / "compare.py", query_params={"runs": marked})


def problems(runs: Sequence[Run]) -> None:
    """Why runs are unreadable."""
    found = [run for run in runs if run.problem]
    for run in found[:5]:
        st.warning(f"{formats.escaped(run.key)}: {formats.escaped(run.problem or '')}")
    if len(found) > 5:
        st.warning(f"{len(found) - 5:,} more runs cannot be read; search for unreadable.")


def chosen(runs: Mapping[str, Run]) -> list[Run]:
    """The runs that the search, the statuses and the tags leave."""
    words = st.session_state.get("q") or ""
    statuses = st.session_state.get("status") or []
    tags = set(st.session_state.get("tags") or [])
    return [
        run
        for run in runs.values()
        if run.matches(words) and (not statuses or run.status in statuses) and tags <= set(run.tags)
    ]


def draw() -> None:
    """The list below the search field, as of now."""
    open_what_was_clicked()
    space = shell.workspace()
    runs = space.runs()
    if not runs:
        shell.empty_root(space.root)
        return
    tiles(list(runs.values()))
    found = chosen(runs)
    if not found:
        st.info("No run matches the search. Try fewer words, or a status such as `failed`.")
        return
    table(found)
    compare_button()
    problems(found)


def filters() -> None:
    """Status, tags and order; their values live in the address."""
    runs = shell.workspace().runs()
    if not runs:
        return
    tags = sorted({tag for run in runs.values() for tag in run.tags})
    present = [name for name in formats.SYMBOLS if any(r.status == name for r in runs.values())]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        st.pills(
            "Status",
            present,
            selection_mode="multi",
            key="status",
            bind="query-params",
            format_func=formats.status,
        )
        if tags:
            st.multiselect(
                "Tags", tags, key="tags", bind="query-params", placeholder="all", width=260
            )
        st.selectbox("Order", list(SORTS), key="sort", bind="query-params", width=200)


def page() -> None:
    """Search field, filters and list, refreshed every few seconds."""
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        shell.header(
            "Runs",
            "All training runs. Look for alerts and rising curves; click a run, or mark several.",
        )
    with right:
        st.text_input(
            "Search",
            key="q",
            bind="query-params",
            placeholder="Search name, tag, group or status  ( / )",
            label_visibility="collapsed",
            icon=":material/search:",
            live=True,
        )
    shell.search_by_keyboard()
    filters()
    st.fragment(draw, run_every=2 * shell.REFRESH_S)()


page()
