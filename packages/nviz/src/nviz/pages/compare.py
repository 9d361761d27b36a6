"""Curves of several runs in one chart: any metrics, by step, tokens or time, with their spread."""

from collections.abc import Mapping, Sequence

import streamlit as st

from nviz import formats, shell
from nviz.charts import View, band_figure, compare_figure, tell_apart
from nviz.queries import compare
from nviz.queries.compare import Grouping, Line
from nviz.queries.curves import AXIS_COLUMNS, Axis
from nviz.store import Run

MOST_RUNS = 50
FIRST_RUNS = 6
FIRST_METRICS = ("loss/train",)
AXES: dict[str, Axis] = {"Step": "step", "Tokens": "tokens", "Time": "time"}
SMOOTHING = {"Off": 0.0, "0.6": 0.6, "0.9": 0.9, "0.98": 0.98, "0.995": 0.995}
GROUPINGS: dict[str, Grouping] = {"Each run": "run", "Each group": "group", "All seeds": "seed"}


def first_choice(runs: Mapping[str, Run]) -> list[str]:
    """The newest run's group, or the newest runs."""
    newest = next(iter(runs.values()))
    same = [key for key, run in runs.items() if newest.group and run.group == newest.group]
    return (same if len(same) > 1 else list(runs))[:FIRST_RUNS]


def choose_runs(runs: Mapping[str, Run]) -> list[Run]:
    """The runs that are chosen by hand, and those that match the words; all in the address."""
    words = st.text_input(
        "Search: add all that match",
        key="q",
        bind="query-params",
        placeholder="name, tag, group, status ( / )",
        icon=":material/search:",
    )
    matching = [key for key, run in runs.items() if words and run.matches(words)]
    first = [] if words else first_choice(runs)
    keys = shell.choose_several(
        runs, first, MOST_RUNS, "Choose runs, or add those that match", help=None
    )
    wanted = list(dict.fromkeys([*keys, *matching]))
    if len(wanted) > MOST_RUNS:
        st.caption(f"{len(wanted):,} runs match; the newest {MOST_RUNS} are drawn.")
    return [runs[key] for key in wanted if key in runs][:MOST_RUNS]


def choose_metrics(chosen: Sequence[Run]) -> list[str]:
    """The metrics to draw, of those that the chosen runs recorded."""
    columns = shell.workspace().columns
    known = sorted({name for run in chosen for name in columns.metrics(run.folder)})
    offered = [name for name in known if name != AXIS_COLUMNS["time"]]
    return st.multiselect(
        "Metrics",
        offered,
        default=[name for name in FIRST_METRICS if name in offered],
        key="metrics",
        bind="query-params",
        placeholder="Choose metrics",
    )


def controls(chosen: Sequence[Run]) -> tuple[View, Grouping]:
    """How to draw; the values live in the address."""
    earlier = False
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        axis = st.selectbox("Along", list(AXES), key="x", bind="query-params", width=92)
        smoothing = st.selectbox(
            "Smoothing",
            list(SMOOTHING),
            index=2,
            key="smooth",
            bind="query-params",
            help="Weight of the moving average",
            width=104,
        )
        grouping = st.selectbox(
            "A line for",
            list(GROUPINGS),
            key="by",
            bind="query-params",
            help="Several runs in one line: their mean, with the lowest and highest as an area",
            width=128,
        )
        log = st.toggle("Log", key="log", bind="query-params")
        if GROUPINGS[grouping] == "run" and any(run.attempt > 1 for run in chosen):
            earlier = st.toggle(
                "Earlier",
                key="earlier",
                bind="query-params",
                help="Also draw, dotted, the steps that a later attempt did again",
            )
    view = View(AXES[axis], SMOOTHING[smoothing], log, earlier, dark=shell.is_dark())
    return view, GROUPINGS[grouping]


@st.cache_resource(show_spinner=False)
def _lines(root: str) -> compare.Lines:
    return compare.Lines(shell.workspace().columns)


def draw(keys: Sequence[str], metrics: Sequence[str], view: View, grouping: Grouping) -> None:
    """A chart for each metric, as of now; runs that are gone are left out and named."""
    space = shell.workspace()
    now = space.runs()
    present = [now[key] for key in keys if key in now]
    if len(present) < len(keys):
        gone = ", ".join(formats.escaped(key) for key in keys if key not in now)
        st.warning(f"No longer there, moved or deleted: {gone}.")
    chosen = dict(zip(compare.labels(present), present, strict=True))
    lines = _lines(str(space.root))
    found, problems = lines.draw(chosen, metrics, view.axis, view.smoothing, view.earlier)
    for metric in metrics:
        show(metric, chosen, found[metric], view, grouping)
    shell.show_problems(problems)


def show(
    metric: str,
    chosen: Mapping[str, Run],
    found: Sequence[Line],
    view: View,
    grouping: Grouping,
) -> None:
    """One metric's chart with what is missing or not finite in it, and its download."""
    drawn = [line for line in found if not line.is_empty]
    without = [line.label for line in found if line.is_empty]
    st.markdown(f"##### {formats.escaped(metric)}")
    if not drawn:
        st.info("No chosen run recorded this metric along this axis. Choose the axis Step.")
        return
    single = grouping == "run"
    if single:
        styles = {label: at for at, label in enumerate(chosen)}
        figure = compare_figure(drawn, styles, view)
        together = tell_apart(figure, view.log)
        shell.chart(figure, f"compare {metric}", f"{metric} of {len(drawn)} runs")
        shell.csv_button(f"compare {metric}", lambda: compare.arrow(drawn))
    else:
        together = show_bands(metric, chosen, view, grouping)
    treated = "marked by crosses" if single else "left out of the means"
    notes = [same_note(labels) for labels in together]
    notes += bad_notes(drawn, treated) + ([missing_note(without)] if without else [])
    if notes:
        st.caption("  \n".join(notes))


def show_bands(
    metric: str, chosen: Mapping[str, Run], view: View, grouping: Grouping
) -> list[list[str]]:
    """One line for each group of runs, with their spread; returns the lines on one another."""
    rows = compare.read(chosen, [metric], shell.workspace().columns)
    groups = compare.groups(chosen, grouping)
    made = compare.bands(rows, groups, metric, view.axis, view.smoothing)
    figure = band_figure(made, view)
    together = tell_apart(figure, view.log)
    shell.chart(figure, f"compare {metric}", f"{metric} of {len(made)} groups")
    shell.csv_button(f"compare {metric}", lambda: compare.band_arrow(made))
    shorter = [name(band.label) for band in made if band.shrinks]
    if shorter:
        st.caption(f"Not all runs reach the end; the line goes on with the rest: {shorter[0]}.")
    return together


def name(label: str) -> str:
    """A run's label within a sentence."""
    return formats.escaped(formats.shortened(label, 48))


def same_note(labels: Sequence[str]) -> str:
    """Which lines lie on one another."""
    first = ", ".join(name(label) for label in labels[:4])
    more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
    return f"{len(labels)} lines lie on one another, dashed so that each shows: {first}{more}."


def bad_notes(drawn: Sequence[Line], treated: str) -> list[str]:
    """How many values were not finite, what became of them, and in which runs."""
    bad = [(line.label, len(line.bad_x)) for line in drawn if len(line.bad_x)]
    if not bad:
        return []
    first = ", ".join(f"{name(label)} ({count})" for label, count in bad[:4])
    more = f" and {len(bad) - 4} more runs" if len(bad) > 4 else ""
    return [f":orange[{sum(c for _, c in bad)} non-finite values], {treated}: {first}{more}"]


def missing_note(without: Sequence[str]) -> str:
    """Which runs have no such metric."""
    first = ", ".join(name(label) for label in without[:4])
    more = f" and {len(without) - 4} more" if len(without) > 4 else ""
    return f"Not recorded by {first}{more}."


def page() -> None:
    """Runs, metrics and how to draw them."""
    space = shell.workspace()
    runs = space.runs()
    shell.header(
        "Compare",
        "Curves of several runs. Look for the one that falls fastest and stays lowest; "
        "a difference smaller than the spread over seeds is none.",
    )
    if not runs:
        shell.empty_root(space.root)
        st.stop()
    shell.search_by_keyboard()
    wide, narrow = st.columns([3, 2], gap="medium")
    with wide:
        chosen = choose_runs(runs)
    if not chosen:
        st.info("Choose runs above, or type words that they have in common.")
        st.stop()
    with narrow:
        metrics = choose_metrics(chosen)
        view, grouping = controls(chosen)
    if not metrics:
        st.info("These runs recorded no metric yet." if not chosen else "Choose a metric above.")
        st.stop()
    keys = [run.key for run in chosen]
    growing = any(run.is_live for run in chosen)
    st.fragment(draw, run_every=2 * shell.REFRESH_S if growing else None)(
        keys, metrics, view, grouping
    )


page()
