"""How fast a run is and where its time goes: MFU, tokens/s, stages, overlap, memory, slow ranks."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.charts import Drawing, Panel, View, panel_figure
from nviz.figures import rank_map_figure, stage_figure, waits_figure
from nviz.queries import curves, performance
from nviz.queries.performance import REST, PeerWaits, RankSpeed, RankTimes, StageTimes
from nviz.store import ColumnReader, Rows, Run

PANELS = (
    Panel(
        "MFU",
        "Model FLOPs utilisation: useful arithmetic over the hardware's peak. Drops cost money.",
        {"MFU": "mfu"},
        unit="share of the peak",
    ),
    Panel(
        "Tokens per second",
        "Of the whole run. Look for drops: slow data, a checkpoint, a slow rank.",
        {"tokens per second": "tokens_per_s"},
        unit="tokens/s",
    ),
    Panel(
        "Overlap",
        "Share of the exchange that is hidden behind arithmetic. 1 is all of it.",
        {"overlap": "overlap_ratio"},
        unit="share hidden",
    ),
    Panel(
        "Waiting for peers",
        "Milliseconds of a step that this rank stands still in the exchange. Its peers are slower.",
        {"waiting": "rdep/wait_ms"},
        unit="ms a step",
    ),
    Panel(
        "Exchange",
        "Bytes of tokens that this rank sends to others in a step. It follows the router's choice.",
        {"bytes sent": "rdep/bytes"},
        unit="bytes a step",
    ),
    Panel(
        "Memory",
        "Peak close to the device's size risks running out; reserved far above it is fragmented.",
        {
            "peak": "memory/peak_gib",
            "reserved": "memory/reserved_gib",
            "allocated": "memory/allocated_gib",
        },
        unit="GiB",
    ),
    Panel(
        "Cost of saving",
        "Milliseconds that a checkpoint stops training for (stall) and takes in all (commit).",
        {"stall": "checkpoint/stall_ms", "commit": "checkpoint/commit_ms"},
        unit="ms",
        points=frozenset({"stall", "commit"}),
    ),
)
LATEST = ("mfu", "tokens_per_s", "step_ms", "overlap_ratio", "memory/peak_gib", "active_ranks")
# A rank this much above the median is named.
SLOW = 1.05
SPEED_COLUMNS = {
    "rank": st.column_config.NumberColumn("Rank", width=70),
    "mean ms": st.column_config.NumberColumn("Own time, ms", format="%.1f", width=110),
    "of median": st.column_config.NumberColumn("Over median", format="%.3f×", width=110),
    "slowest": st.column_config.NumberColumn("Slowest in", format="percent", width=110),
}


@dataclass(frozen=True, slots=True)
class Found:
    """All that the page shows."""

    drawings: dict[str, Drawing]
    latest: dict[str, float]
    stages: StageTimes | None
    inner: StageTimes | None
    speeds: list[RankSpeed]
    ranks: RankTimes | None
    waits: PeerWaits | None
    table: curves.Table
    problems: list[str]


def read(columns: ColumnReader, folder: Path, ranks: list[int], rank: int, view: View) -> Found:
    """One look at what is needed of the run's files."""
    stages, inner = performance.stage_names(columns.metrics(folder, rank))
    curved = {name for panel in PANELS for name in panel.metrics.values()} | set(LATEST)
    timed = {performance.PREFIX + name for name in (*stages, *inner)} | {performance.STEP_MS}
    rows = columns.rows(folder, sorted(curved | timed), rank)
    table = curves.table_of(rows)
    drawn = {panel.title: panel_figure(table, panel, view) for panel in PANELS}
    times = performance.stage_times
    has_steps = performance.STEP_MS in rows.columns
    several = has_steps and len(ranks) > 1
    recent = recent_rows(columns, folder, ranks) if several else {}
    return Found(
        drawings={title: drawing for title, drawing in drawn.items() if drawing},
        latest=curves.latest_of(table, LATEST),
        stages=times(rows, stages, has_steps) if stages else None,
        inner=times(rows, inner, False) if inner else None,
        speeds=performance.rank_speeds(recent),
        ranks=rank_map(columns, folder, ranks, rows) if several else None,
        waits=performance.peer_waits(recent),
        table=table,
        problems=list(rows.problems),
    )


def recent_rows(columns: ColumnReader, folder: Path, ranks: list[int]) -> dict[int, Rows]:
    """The newest steps of every rank: own time, and the waiting for each peer."""
    last = performance.RECENT_STEPS
    peers = performance.peers_of(columns.metrics(folder))
    names = [*performance.OWN, *(f"{performance.WAIT}/{peer}" for peer in peers)]
    return {rank: columns.rows(folder, names, rank, last) for rank in ranks}


def rank_map(columns: ColumnReader, folder: Path, ranks: list[int], rows: Rows) -> RankTimes:
    """All ranks over the steps that `rows` span."""
    span = int(rows.step.min()), int(rows.step.max())
    each = ((rank, columns.rows(folder, performance.OWN, rank)) for rank in ranks)
    return performance.rank_times(each, span)


def tiles(latest: dict[str, float]) -> None:
    """The newest values of what the run recorded."""
    words = {
        "MFU": lambda: f"{100 * latest['mfu']:.1f} %",
        "Tokens/s": lambda: formats.short(latest["tokens_per_s"]),
        "Step time": lambda: f"{formats.value(latest['step_ms'], 3)} ms",
        "Overlap": lambda: f"{100 * latest['overlap_ratio']:.0f} %",
        "Peak memory": lambda: f"{formats.value(latest['memory/peak_gib'], 3)} GiB",
        "Ranks": lambda: formats.count(latest["active_ranks"]),
    }
    known = [item for item, name in zip(words.items(), LATEST, strict=True) if name in latest]
    for column, (label, word) in zip(st.columns(max(1, len(known))), known, strict=False):
        column.metric(label, word())


def stage_charts(found: Found, dark: bool) -> None:
    """The stages of a step, and those inside forward and backward."""
    if found.stages is None:
        return
    data = f" Data takes {found.stages.share('data'):.1%}." if "data" in found.stages.stages else ""
    beside = found.inner is not None
    places = st.columns([3, 2], gap="medium") if beside else [st.container()]
    with places[0]:
        shell.section(
            "Step time by stage",
            f"Means of {len(found.stages.step_B)} stretches of steps, stacked.{data} "
            "The parts should be level, data near 0 and the grey rest small.",
        )
        shell.chart(stage_figure(found.stages, dark), "step time by stage", "Step time by stage")
        shell.csv_button("stages", lambda: stage_table(found))
    if found.inner is not None:
        with places[1]:
            shell.section(
                "Inside the MoE layers",
                "Part of forward and backward. Dispatch and combine are exchange: look for growth.",
            )
            shell.chart(stage_figure(found.inner, dark), "moe stages", "Time inside the MoE layers")


def stage_table(found: Found) -> pa.Table:
    """The stacked values, a row a stretch of steps."""
    columns = {}
    for item in (found.stages, found.inner):
        if item is not None:
            columns["step"] = item.step_B
            columns |= {
                f"{name} ms" if name == REST else f"time_ms/{name}": item.ms_PB[at]
                for at, name in enumerate(item.stages)
            }
    return pa.table(columns)


def rank_charts(found: Found, dark: bool) -> None:
    """Which ranks are slow, and since when."""
    if not found.speeds:
        return
    slow = [item for item in found.speeds if item.relative >= SLOW]
    names = ", ".join(f"{item.rank} ({item.relative:.2f}×)" for item in slow[:6])
    left, right = st.columns([3, 2], gap="medium")
    with left:
        shell.section(
            "Ranks over steps",
            "Each rank's own step time, waiting taken out, over the ranks' median. A row that "
            "stays orange is a slow rank: everyone waits for it.",
        )
        if found.ranks is not None:
            shell.chart(
                rank_map_figure(found.ranks, dark), "ranks over steps", "Step time of each rank"
            )
            shell.csv_button("ranks", partial(performance.rank_table, found.ranks))
        if found.waits is not None:
            shell.section(
                "Who waits for whom",
                f"Over the newest {performance.RECENT_STEPS} steps. A bright column is a peer that "
                "comes late.",
            )
            shell.chart(waits_figure(found.waits), "waits", "Waiting of each rank for each peer")
    with right:
        shell.section("Slowest ranks", f"Over the newest {performance.RECENT_STEPS} steps.")
        if slow:
            st.warning(f"Slow: rank {names}.", icon=":material/warning:")
        else:
            st.success("No rank is 5 % above the median.", icon=":material/check_circle:")
        table = speed_table(found.speeds)
        st.dataframe(
            table,
            column_config=SPEED_COLUMNS,
            hide_index=True,
            height=min(250, 38 + 35 * table.num_rows),
            key="slowest ranks",
        )


def speed_table(speeds: list[RankSpeed]) -> pa.Table:
    """The ranks, the slowest first."""
    rows = [(item.rank, item.mean_ms, item.relative, item.slowest) for item in speeds]
    return formats.table(list(SPEED_COLUMNS), rows)


def panels(drawings: dict[str, Drawing]) -> None:
    """The curves, two in a row."""
    shown = [panel for panel in PANELS if panel.title in drawings]
    for i in range(0, len(shown), 2):
        for column, panel in zip(st.columns(2, gap="medium"), shown[i : i + 2], strict=False):
            with column:
                shell.panel(panel, drawings[panel.title])


def draw(run: Run) -> None:
    """Everything as of now."""
    dark = shell.is_dark()
    columns = shell.workspace().columns
    ranks = columns.ranks(run.folder)
    wanted = st.session_state.get("rank")
    rank = wanted if wanted in ranks else min(ranks, default=0)
    found = read(columns, run.folder, ranks, rank, View(dark=dark)) if ranks else None
    shell.status_line(run, [run.key, f"rank {rank} of {len(ranks)}"])
    if found is None or not (found.drawings or found.stages or found.speeds):
        nothing(run, recorded=found is not None)
        return
    tiles(found.latest)
    stage_charts(found, dark)
    rank_charts(found, dark)
    panels(found.drawings)
    if found.drawings:
        shell.csv_button("speed curves", lambda: curves.arrow(found.table), "Curves as CSV")
    shell.show_problems(found.problems)


def nothing(run: Run, recorded: bool) -> None:
    """Why there is nothing to show."""
    if recorded:
        st.info("This run recorded no times. Newer versions of nmoe-train do.")
    elif run.is_live:
        st.info("No step yet. The first one appears here by itself; compiling can take a minute.")
    else:
        st.info("This run ended before its first step. Its faults may say why.")


def choose_rank(run: Run) -> None:
    """The choice of a rank where there are several, kept in the address."""
    ranks = shell.workspace().columns.ranks(run.folder)
    if len(ranks) > 1:
        st.selectbox(
            "Rank",
            ranks,
            key="rank",
            bind="query-params",
            width=140,
            help="Curves and stages are of this rank; the ranks are compared below",
        )


def page() -> None:
    """The chosen run's speed."""
    run = shell.choose_run(
        "Performance",
        "How fast it trains and where a step's time goes. Look for growing parts and slow ranks.",
    )
    choose_rank(run)
    shell.live(draw, run)


page()
