"""A run's configuration as a searchable flat table, with versions, layout and fingerprint."""

from collections.abc import Sequence

import streamlit as st

from nviz import formats, shell
from nviz.queries.configuration import flatten, search
from nviz.store import Run


def facts(run: Run) -> list[tuple[str, str]]:
    """What identifies the run beside its configuration."""
    found = [
        ("run", run.key),
        ("fingerprint", run.fingerprint or "–"),
        ("git revision", run.git_revision or "–"),
        ("device", run.device or "–"),
        ("hosts", ", ".join(run.hosts) or "–"),
        ("group", run.group or "–"),
        ("tags", ", ".join(run.tags) or "–"),
    ]
    return found + [(f"layout {name}", value) for name, value in flatten(run.layout)]


def show(rows: Sequence[tuple[str, str]], names: tuple[str, str], key: str) -> None:
    """A two-column table as high as its rows, within reason."""
    frame = formats.table(list(names), rows)
    st.dataframe(frame, hide_index=True, height=min(560, 38 + 35 * max(1, len(rows))), key=key)


def page() -> None:
    """The chosen run's configuration."""
    run = shell.choose_run(
        "Configuration",
        "How this run was started. Look for a setting that you did not mean.",
    )
    shell.status_line(run, [run.name])
    left, right = st.columns([3, 2], gap="medium")
    with left:
        shell.section("Settings", "Every setting by its dotted name, defaults included.")
        words = st.text_input(
            "Search settings",
            key="find",
            bind="query-params",
            placeholder="Search names and values",
            label_visibility="collapsed",
            icon=":material/search:",
        )
        rows = search(flatten(run.config), words or "")
        if rows:
            show(rows, ("setting", "value"), "settings")
        else:
            st.info("No setting matches." if run.config else "run.json holds no configuration.")
    with right:
        shell.section("Identity", "Equal fingerprints: the settings that change results are equal.")
        show(facts(run), ("what", "value"), "identity")
        if run.versions:
            shell.section("Versions", "Software that the run used.")
            show(flatten(run.versions), ("package", "version"), "versions")


page()
