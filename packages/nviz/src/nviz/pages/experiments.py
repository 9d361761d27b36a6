"""Runs side by side: which settings differ, and what came of it."""

import time
from collections.abc import Sequence

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.queries import experiments
from nviz.queries.configuration import search
from nviz.queries.experiments import Setting
from nviz.store import Run

MOST_RUNS = 12
FIRST_RUNS = 4


def first_choice(runs: dict[str, Run]) -> list[str]:
    """The newest runs of the newest run's group, or simply the newest ones."""
    newest = next(iter(runs.values()))
    same = [key for key, run in runs.items() if newest.group and run.group == newest.group]
    return (same if len(same) > 1 else list(runs))[:FIRST_RUNS]


def choose(runs: dict[str, Run]) -> list[Run]:
    """The runs to compare, kept in the address."""
    keys = shell.choose_several(
        runs,
        first_choice(runs),
        MOST_RUNS,
        "Choose runs to compare",
        f"Up to {MOST_RUNS}; the first is at the left",
    )
    return [runs[key] for key in keys if key in runs]


def headings(chosen: Sequence[Run]) -> list[str]:
    """A name for each run's column: its own, with its key where names repeat."""
    names = [run.name for run in chosen]
    return [f"{run.name} ({run.key})" if names.count(run.name) > 1 else run.name for run in chosen]


def setting_table(rows: Sequence[Setting], chosen: Sequence[Run]) -> pa.Table:
    """A row a setting, a column a run."""
    return formats.table(
        ["setting", *headings(chosen)],
        [(row.name, *("–" if value is None else value for value in row.values)) for row in rows],
    )


def outcome_table(chosen: Sequence[Run]) -> pa.Table:
    """What came of each run, a column a run like the settings."""
    space, now = shell.workspace(), time.time()
    summaries = [space.summary(run) for run in chosen]
    facts = {
        "status": [formats.status(run.status) for run in chosen],
        "step": [
            f"{formats.count(summary.step)} / {formats.count(run.steps)}"
            for run, summary in zip(chosen, summaries, strict=True)
        ],
        "training loss": [formats.value(summary.loss) for summary in summaries],
        "validation loss": [formats.value(summary.validation) for summary in summaries],
        "tokens per second": [formats.short(summary.tokens_per_s) for summary in summaries],
        "duration": [formats.duration(run.duration_s(now)) for run in chosen],
        "attempts": [str(run.attempt) for run in chosen],
        "fingerprint": [(run.fingerprint or "–")[:12] for run in chosen],
        "git revision": [(run.git_revision or "–")[:12] for run in chosen],
        "device": [run.device or "–" for run in chosen],
    }
    return formats.table(
        ["outcome", *headings(chosen)], [(name, *values) for name, values in facts.items()]
    )


def show(table: pa.Table, key: str) -> None:
    """A table as high as its rows, within reason, and its download."""
    config = {table.column_names[0]: st.column_config.TextColumn(pinned=True, width=230)}
    st.dataframe(
        table,
        column_config=config,
        hide_index=True,
        height=min(560, 38 + 35 * max(1, table.num_rows)),
        key=key,
    )
    shell.csv_button(key, lambda: table)


def matching(rows: Sequence[Setting], words: str) -> list[Setting]:
    """Settings whose name or one of whose values holds every word."""
    texts = [(row.name, " ".join(value or "" for value in row.values)) for row in rows]
    found = {name for name, _ in search(texts, words)}
    return [row for row in rows if row.name in found]


def draw(chosen: list[Run], words: str) -> None:
    """Outcome, what differs, what is equal."""
    shell.section("Outcome", "What came of each run. Equal fingerprints: the same experiment.")
    show(outcome_table(chosen), "outcome")
    rows = experiments.settings([run.config for run in chosen])
    chosen_rows = matching(rows, words)
    differing = [row for row in chosen_rows if row.differs]
    equal = [row for row in chosen_rows if not row.differs]
    total = sum(row.differs for row in rows)
    shell.section(
        "What differs",
        f"{total} of {len(rows)} settings. A dash is a setting that a run does not have.",
    )
    if differing:
        show(setting_table(differing, chosen), "differing settings")
    elif words and total:
        st.info("No differing setting matches the search.")
    else:
        st.info("All settings are equal: what differs is chance, software or hardware.")
    if equal:
        with st.expander(f"{len(equal)} equal settings"):
            show(setting_table(equal, chosen[:1]), "equal settings")


def page() -> None:
    """The choice of runs, and their settings side by side."""
    space = shell.workspace()
    runs = space.runs()
    shell.header(
        "Experiments",
        "Settings of several runs, and what came of them. Look for what explains the difference.",
    )
    if not runs:
        shell.empty_root(space.root)
        return
    shell.search_by_keyboard()
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        chosen = choose(runs)
    with right:
        words = st.text_input(
            "Search settings",
            key="find",
            bind="query-params",
            placeholder="Search names and values",
            label_visibility="collapsed",
            icon=":material/search:",
        )
    if not chosen:
        st.info("Choose at least one run above. Two or more show what differs.")
        return
    draw(chosen, words or "")


page()
