"""The checkpoints of a run: what is in them, how large and old they are, whether they are whole."""

import time
from typing import Any

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.figures import parts_figure
from nviz.queries import checkpoints
from nviz.queries.configuration import flatten
from nviz.store import Run
from nviz.store.checkpoints import Checkpoint, Tensor, list_checkpoints

MOST_TENSORS = 5000
STATES = {"complete": "✓ complete", "unfinished": "… unfinished", "damaged": "✕ damaged"}
LIST_COLUMNS: dict[str, Any] = {
    "checkpoint": st.column_config.TextColumn("Checkpoint", width=140),
    "state": st.column_config.TextColumn("State", width=110),
    "step": st.column_config.NumberColumn("Step", format="localized", width=80),
    "tokens": st.column_config.TextColumn("Tokens", width=80),
    "size": st.column_config.TextColumn("Size", width=90),
    "files": st.column_config.NumberColumn("Files", width=60),
    "written": st.column_config.DatetimeColumn("Written", format="distance", width=120),
    "note": st.column_config.TextColumn("Note", width="large"),
}
FILE_COLUMNS: dict[str, Any] = {
    "file": st.column_config.TextColumn("File", width=190),
    "bytes": st.column_config.NumberColumn("Bytes", format="localized", width=120),
    "state": st.column_config.TextColumn("State", width=220),
    "sha256": st.column_config.TextColumn("SHA-256", width=120),
}
TENSOR_COLUMNS: dict[str, Any] = {
    "tensor": st.column_config.TextColumn("Tensor", width=380),
    "shape": st.column_config.TextColumn("Shape", width=120),
    "dtype": st.column_config.TextColumn("Dtype", width=80),
    "numbers": st.column_config.NumberColumn("Numbers", format="localized", width=110),
    "file": st.column_config.TextColumn("File", width=180),
}


def size(count: float) -> str:
    """Bytes with three digits in a unit of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def tiles(found: list[Checkpoint], now_unix_s: float) -> None:
    """How many there are, and how old the newest whole one is."""
    complete = [item for item in found if item.state == "complete"]
    newest = complete[0] if complete else None
    facts = {
        "Complete": formats.count(len(complete)),
        "Not complete": formats.count(len(found) - len(complete)),
        "Newest step": formats.count(newest.step if newest else None),
        "Newest is old": formats.duration(now_unix_s - newest.written_unix_s) if newest else "–",
        "Size, newest": size(newest.bytes) if newest else "–",
        "Size, all": size(sum(item.bytes for item in found)),
    }
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def list_table(found: list[Checkpoint], run: Run) -> pa.Table:
    """The checkpoints, the newest first."""
    rows = [
        (
            item.name,
            STATES[item.state],
            item.step,
            formats.short(item.tokens),
            size(item.bytes),
            len(item.files),
            formats.moment(item.written_unix_s),
            item.problem or other_settings(item, run),
        )
        for item in found
    ]
    return formats.table(list(LIST_COLUMNS), rows)


def other_settings(item: Checkpoint, run: Run) -> str:
    """Says so if the checkpoint was made with settings that are not the run's."""
    known = item.fingerprint and run.fingerprint
    return "made with other settings" if known and item.fingerprint != run.fingerprint else ""


def verdict(found: list[Checkpoint]) -> None:
    """Whether the run can go on from one of these."""
    damaged = [item for item in found if item.state == "damaged"]
    if damaged:
        first = damaged[0]
        st.error(
            f"Damaged: {formats.escaped(first.name)} ({formats.escaped(first.problem or '')})"
            f"{f' and {len(damaged) - 1} more' if len(damaged) > 1 else ''}. "
            "A resume takes an older one.",
            icon=":material/error:",
        )
    if not any(item.state == "complete" for item in found):
        st.warning("None is complete: the run would start from nothing.", icon=":material/warning:")


def contents(item: Checkpoint) -> None:
    """Parts, files and tensors of one checkpoint."""
    left, right = st.columns([2, 3], gap="medium")
    found = checkpoints.parts(item.tensors)
    with left:
        shell.section("Parts", "What the bytes are for. Optimizer states are twice the weights.")
        if found:
            figure = parts_figure(found, shell.is_dark())
            shell.chart(figure, "checkpoint parts", "Size of each part of the checkpoint")
        else:
            st.info("meta.json names no tensors.")
    with right:
        shell.section(
            "Files",
            "One a writing rank. Sizes are compared with meta.json; checksums are left to "
            "`nmoe-train`, which reads all bytes.",
        )
        st.dataframe(
            file_table(item),
            column_config=FILE_COLUMNS,
            hide_index=True,
            height=min(250, 38 + 35 * max(1, len(item.files))),
            key="checkpoint files",
        )
        sizes = ", ".join(f"{name} {value}" for name, value in flatten(item.layout))
        if sizes:
            st.caption(formats.escaped(f"Layout: {sizes}"))
    tensors(item)


def file_table(item: Checkpoint) -> pa.Table:
    """The files of a checkpoint by name."""
    rows = [
        (file.name, file.bytes, file.problem or "as written", (file.sha256 or "")[:12])
        for file in item.files
    ]
    return formats.table(list(FILE_COLUMNS), rows)


def tensors(item: Checkpoint) -> None:
    """The tensors that match the search."""
    if not item.tensors:
        return
    chosen = checkpoints.matching(item.tensors, st.session_state.get("find") or "")
    numbers = formats.short(sum(tensor.elements for tensor in chosen))
    cut = f", the first {MOST_TENSORS:,} shown" if len(chosen) > MOST_TENSORS else ""
    shell.section("Tensors", f"{len(chosen):,} of {len(item.tensors):,}, {numbers} numbers{cut}.")
    if not chosen:
        st.info("No tensor matches the search.")
        return
    st.dataframe(
        tensor_table(chosen[:MOST_TENSORS]),
        column_config=TENSOR_COLUMNS,
        hide_index=True,
        height=min(380, 38 + 35 * len(chosen)),
        key="tensors",
    )
    shell.csv_button("tensors", lambda: tensor_table(chosen))


def tensor_table(chosen: list[Tensor]) -> pa.Table:
    """Tensors as rows."""
    rows = [
        (tensor.name, "×".join(map(str, tensor.shape)), tensor.dtype, tensor.elements, tensor.file)
        for tensor in chosen
    ]
    return formats.table(list(TENSOR_COLUMNS), rows)


def draw(run: Run) -> None:
    """Everything as of now."""
    found = list_checkpoints(run.folder)
    shell.status_line(run, [run.key, f"step {formats.count(run.step)}"])
    if not found:
        nothing(run)
        return
    tiles(found, time.time())
    # In a place of its own, so that a new line moves no chart to another place, drawn anew.
    with st.container():
        verdict(found)
    shell.section(
        "Checkpoints", "The newest first. A resume takes the newest complete one that is sound."
    )
    table = list_table(found, run)
    st.dataframe(
        table,
        column_config=LIST_COLUMNS,
        hide_index=True,
        height=min(250, 38 + 35 * table.num_rows),
        key="checkpoints",
    )
    shell.csv_button("checkpoints", lambda: table)
    wanted = st.session_state.get("checkpoint")
    contents(next((item for item in found if item.name == wanted), found[0]))


def nothing(run: Run) -> None:
    """Why there are no checkpoints."""
    if run.is_live:
        st.info("No checkpoint yet. The first one appears here by itself.")
    else:
        st.info("This run has no checkpoint: it ended before the first, or they were removed.")


def controls(run: Run) -> None:
    """Which checkpoint to look into, and the search for tensors, kept in the address."""
    names = [item.name for item in list_checkpoints(run.folder)]
    if not names:
        return
    shell.search_by_keyboard()
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        st.selectbox(
            "Look into", names, key="checkpoint", bind="query-params", width=220, help="By step"
        )
        st.text_input(
            "Search tensors",
            key="find",
            bind="query-params",
            placeholder="Words of a name, such as experts.17 down",
            icon=":material/search:",
            width=380,
        )


def page() -> None:
    """The chosen run's checkpoints."""
    run = shell.choose_run(
        "Checkpoints",
        "What the run could go on from. Look for a newest one that is old, unfinished or damaged.",
    )
    controls(run)
    shell.live(draw, run)


page()
