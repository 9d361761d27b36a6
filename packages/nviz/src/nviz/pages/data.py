"""Token shards: manifest, shares of the sources, lengths of documents, and the documents' text."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import streamlit as st

from nviz import formats, shell
from nviz.errors import VizError
from nviz.figures import lengths_figure, shares_figure
from nviz.queries import data
from nviz.queries.configuration import flatten
from nviz.queries.data import MOST_IDS, Document, Statistics
from nviz.store import Run
from nviz.store.decoding import open_decoder
from nviz.store.manifests import (
    MANIFEST,
    Dataset,
    datasets_of,
    find_datasets,
    read_dataset,
)
from nviz.store.parse import step_number
from nviz.store.runs import Signature, signature

LINE = "What the runs learn from. Look for a mixture that you did not mean; read some documents."
START_HINT = "nmoe-data prep my-texts --out runs/data"
FIND_S = 10.0
SHARD_COLUMNS: dict[str, Any] = {
    "shard": st.column_config.TextColumn("Shard", width=150),
    "tokens": st.column_config.NumberColumn("Tokens", format="localized", width=110),
    "documents": st.column_config.NumberColumn("Documents", format="localized", width=100),
    "mean": st.column_config.NumberColumn("Tokens a document", format="%.1f", width=140),
    "lowest id": st.column_config.NumberColumn("Lowest id", width=90),
    "highest id": st.column_config.NumberColumn("Highest id", width=95),
    "sha256": st.column_config.TextColumn("SHA-256", width=150),
}
SHARE_COLUMNS: dict[str, Any] = {
    "source": st.column_config.TextColumn("Source", width=220),
    "share": st.column_config.NumberColumn("Share of tokens", format="percent", width=120),
    "tokens": st.column_config.NumberColumn("Tokens", format="localized", width=110),
    "documents": st.column_config.NumberColumn("Documents", format="localized", width=100),
    "files": st.column_config.NumberColumn("Files", format="localized", width=70),
    "bytes": st.column_config.NumberColumn("Bytes", format="localized", width=120),
}


@st.cache_data(ttl=FIND_S, max_entries=4, show_spinner=False)
def found_folders(root: str) -> dict[str, Path]:
    """Data sets by key; the walk is done at most once in ten seconds."""
    return find_datasets(Path(root), shell.workspace().runs().values())


@st.cache_data(max_entries=16, show_spinner="Reading the shards' indices …")
def statistics(_dataset: Dataset, key: str, seen: Signature | None) -> Statistics:
    """Shares and lengths, kept while the manifest is unchanged."""
    return data.statistics(_dataset)


def empty() -> None:
    """The page without any data set: what would be here, and how to make it."""
    with st.container(border=True):
        st.subheader("No token shards here yet", anchor=False)
        st.write("Data sets that nmoe-data prepared below the runs' folder appear here:")
        st.code(START_HINT, language="shell")
        root = formats.escaped(str(shell.workspace().root))
        st.caption(f"Looking in {root}, three levels below, and in the data folder of each run.")


def run_of_address() -> Run | None:
    """The run that the address names, or that was looked at last."""
    key = st.query_params.get("run") or st.session_state.get("last_run") or ""
    return shell.workspace().run(key)


def choose(folders: dict[str, Path], run: Run | None) -> str:
    """The key of the data set: the address' choice, else the run's, else the first."""
    own = datasets_of(shell.workspace().root, run) if run else {}
    key = st.query_params.get("data") or next(iter(own), next(iter(folders)))
    st.session_state["data_choice"] = key if key in folders else None

    def take() -> None:
        st.query_params["data"] = st.session_state["data_choice"]

    st.selectbox(
        "Data set",
        list(folders),
        key="data_choice",
        on_change=take,
        placeholder="Choose a data set",
        label_visibility="collapsed",
    )
    return key


def outside_line(run: Run | None) -> None:
    """Says so if the run's data lie where nviz does not look."""
    where = run.data_folder if run else None
    if run and where and not datasets_of(shell.workspace().root, run):
        st.info(
            f"The data of {formats.escaped(run.name)} lie in {formats.escaped(where[:300])}, "
            "outside of the folder that is served, and nviz opens nothing there. Serve a folder "
            "that holds both."
        )


def tiles(item: Dataset, found: Statistics) -> None:
    """The data set in short."""
    facts = {
        "Tokens": formats.short(item.tokens),
        "Documents": formats.count(item.documents),
        "Shards": formats.count(len(item.shards)),
        "Median length": f"{formats.short(found.median_tokens)} tokens",
        "Longest": f"{formats.short(found.longest_tokens)} tokens",
        "Records refused": formats.count(refused(item)),
    }
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def refused(item: Dataset) -> int | None:
    """How many records prep refused, None if the manifest does not say."""
    by_reason = item.counts.get("rejected")
    if not isinstance(by_reason, dict):
        return None
    return sum(step_number(count) or 0 for count in by_reason.values())


def sources(found: Statistics, dark: bool) -> None:
    """Shares of the sources and lengths of documents."""
    left, right = st.columns(2, gap="medium")
    note = f" Counted over every {found.stride}th document." if found.stride > 1 else ""
    with left:
        shell.section(
            "Sources",
            f"Share of the tokens, by source.{note} Look whether it is the mixture you meant.",
        )
        shell.chart(shares_figure(found.shares, dark), "source shares", "Share of each source")
    with right:
        shell.section(
            "Document lengths", "Documents by tokens. Very short ones teach little; look for them."
        )
        shell.chart(lengths_figure(found, dark), "document lengths", "Documents by length")
    table = share_table(found)
    with st.expander("Sources in numbers"):
        st.dataframe(table, column_config=SHARE_COLUMNS, hide_index=True, key="shares")
        shell.csv_button("sources", lambda: table)


def share_table(found: Statistics) -> pa.Table:
    """The sources by tokens."""
    total = max(1, sum(share.tokens for share in found.shares))
    rows = [
        (
            share.group,
            share.tokens / total,
            share.tokens,
            share.documents,
            share.files,
            share.bytes,
        )
        for share in found.shares
    ]
    return formats.table(list(SHARE_COLUMNS), rows)


def shards(item: Dataset) -> None:
    """Each shard's counts."""
    shell.section("Shards", "By the manifest. A shard far from the others is worth a look.")
    rows = [
        (
            shard.name,
            shard.tokens,
            shard.documents,
            shard.tokens / shard.documents if shard.documents else None,
            shard.min_id,
            shard.max_id,
            shard.sha256[:16],
        )
        for shard in item.shards
    ]
    table = formats.table(list(SHARD_COLUMNS), rows)
    st.dataframe(
        table,
        column_config=SHARD_COLUMNS,
        hide_index=True,
        height=min(250, 38 + 35 * max(1, len(rows))),
        key="shards",
    )
    shell.csv_button("shards", lambda: table)


def manifest(item: Dataset) -> None:
    """Where the data set came from, folded away."""
    with st.expander("Manifest: tool, tokenizer, settings, counts"):
        rows = [
            ("folder", item.key),
            ("split", item.split),
            ("made by", item.tool),
            ("command", item.command),
            *[(f"tokenizer {name}", value) for name, value in flatten(item.tokenizer)],
            *[(f"setting {name}", value) for name, value in flatten(item.arguments)],
            *[(f"count {name}", value) for name, value in flatten(item.counts)],
        ]
        st.dataframe(formats.table(["what", "value"], rows), hide_index=True, key="manifest")


def documents(item: Dataset) -> None:
    """One document, decoded."""
    shell.section("Documents", "A document as the model sees it, and the record it came from.")
    last = (item.documents or 0) - 1
    if last < 0:
        st.info("The data set holds no document.")
        return
    number = st.number_input(
        f"Document, 0 to {last:,}",
        min_value=0,
        max_value=last,
        value=0,
        step=1,
        key="document",
        bind="query-params",
        width=260,
    )
    try:
        decode = open_decoder(shell.workspace().root, item)
        found = data.find_document(item, int(number or 0), decode)
    except VizError as error:
        st.warning(formats.escaped(str(error)))
        return
    document(found)


def document(found: Document) -> None:
    """A document's text, shown letter by letter, and its origin."""
    st.caption(
        formats.escaped(
            f"{found.tokens:,} tokens, {found.shard} from token {found.start:,}; "
            f"from {found.source} at {found.offset:,}; id {found.id:016x}"
        )
    )
    st.code(found.text, language=None, wrap_lines=True, height=320)
    if found.tokens > data.MOST_TOKENS:
        st.caption(f"The first {data.MOST_TOKENS:,} of {found.tokens:,} tokens.")
    with st.expander(f"Token ids, the first {min(MOST_IDS, len(found.ids))}"):
        st.code(" ".join(map(str, found.ids)), language=None, wrap_lines=True)


def draw(item: Dataset) -> None:
    """The chosen data set."""
    tokenizer = str(item.tokenizer.get("name", "?"))
    st.caption(formats.escaped(f"{item.key} · {item.split} · tokenizer {tokenizer} · {item.tool}"))
    found = statistics(item, item.key, signature(item.folder / MANIFEST))
    tiles(item, found)
    sources(found, shell.is_dark())
    documents(item)
    shards(item)
    manifest(item)
    shell.show_problems(found.problems)


def page() -> None:
    """The choice of a data set, and what it holds."""
    space = shell.workspace()
    folders = found_folders(str(space.root))
    run = run_of_address()
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        shell.header("Data", LINE)
    if not folders:
        outside_line(run)
        empty()
        return
    with right:
        key = choose(folders, run)
    if not st.query_params.get("data"):
        outside_line(run)
    if key not in folders:
        st.warning(
            f"There is no data set **{formats.escaped(key[:200])}** here (any more). "
            "Choose another one above."
        )
        return
    item = read_dataset(key, folders[key])
    if item.problem:
        st.error(formats.escaped(f"{item.key}: {item.problem}"))
        return
    draw(item)


page()
