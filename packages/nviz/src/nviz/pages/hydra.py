"""The judge pipeline: labels, heads, filtered corpora and reports, through their files alone."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import duckdb
import streamlit as st

from nviz import formats, shell
from nviz.charts import View
from nviz.hydra_figures import acceptance_figure, agreement_figure, quality_figure, score_figure
from nviz.queries import hydra
from nviz.queries.hydra import Acceptance, Agreement, Example, Triple
from nviz.store import HydraFolder
from nviz.store.parse import finite, mapping

TITLES = {
    "labels": "Labels",
    "heads": "Heads",
    "filter": "Filtered corpus",
    "report": "Report",
}
LINE = (
    "A judge grades a sample, heads learn its grades and filter a corpus. Look for agreement first."
)
START_HINT = "nmoe-data hydra label my-texts --model NAME --base-url URL --out runs/labels"
NUMBERS = {"spearman": "Spearman", "pearson": "Pearson", "mae": "MAE", "f1_at_3": "F1 at 3"}
BANDS = ("drop", "band", "keep")
LIST_PX = 480
# Names in the session and in the address.
THRESHOLDS, BAND = "thresholds", "band"


def empty() -> None:
    """The page without any folder: what would be here, and how to make it."""
    with st.container(border=True):
        st.subheader("Nothing of HYDRA here yet", anchor=False)
        st.write("Labels, heads, filtered corpora and reports appear here. Begin with labels:")
        st.code(START_HINT, language="shell")
        root = formats.escaped(str(shell.workspace().root))
        st.caption(f"Looking in {root} and three levels below for what nmoe-data hydra writes.")


def choose(found: dict[str, HydraFolder]) -> HydraFolder:
    """The folder that the address or the reader names, else the newest."""
    key = st.query_params.get("folder") or next(iter(found))
    st.session_state["hydra_choice"] = key if key in found else None

    def take() -> None:
        st.query_params["folder"] = st.session_state["hydra_choice"]
        # They belong to the folder that was shown before.
        st.session_state.pop(THRESHOLDS, None)

    st.selectbox(
        "Folder",
        list(found),
        format_func=lambda item: f"{item} · {found[item].kind}" if item in found else item,
        key="hydra_choice",
        on_change=take,
        placeholder="Choose a folder",
        label_visibility="collapsed",
    )
    if key not in found:
        st.warning(
            f"There is no folder **{formats.escaped(key[:200])}** here (any more). "
            "Choose another one above."
        )
        st.stop()
    return found[key]


def tiles(facts: dict[str, str]) -> None:
    """Short facts side by side."""
    for column, (label, value) in zip(st.columns(len(facts)), facts.items(), strict=True):
        column.metric(label, value)


def labels(item: HydraFolder, view: View) -> None:
    """How many labels there are by status, and which scores were given."""
    try:
        states, scores = hydra.status_counts(item.folder), hydra.score_counts(item.folder)
    except duckdb.Error:
        st.info("No labels yet: labels.parquet is not there, or not whole.")
        return
    scored = sum(count for _, status, _, count in states if status == "scored")
    total = sum(count for *_, count in states)
    usage = mapping(item.content.get("usage"))
    tokens = finite(usage.get("prompt_tokens")), finite(usage.get("completion_tokens"))
    tiles(
        {
            "Labels": formats.count(total),
            "Scored": formats.count(scored),
            "Tokens": formats.short(None if None in tokens else sum(filter(None, tokens))),
            "Cost": formats.value(finite(usage.get("cost"))),
            "State": str(item.content.get("state", "–")),
        }
    )
    left, right = st.columns([3, 2], gap="medium")
    with left:
        shell.section("Scores", "Share of each score by dimension. A judge that gives one score "
                      "to all teaches nothing.")  # fmt: skip
        shell.chart(score_figure(scores, view), "scores", "Share of each score by dimension")
        shell.csv_button("scores", lambda: hydra.scores_arrow(scores))
    with right:
        shell.section("Status", "Each failure under its own name; unscored is never a low score.")
        st.dataframe(
            formats.table(["model", "status", "detail", "labels"], states),
            hide_index=True,
            key="status",
        )


def acceptance(calibration: object, view: View) -> Acceptance | None:
    """The acceptance curve with thresholds to drag, or that there is none; returns what is drawn,
    with the thresholds as the reader left them.
    """
    shell.section(
        "Acceptance",
        "What keeping all documents from a quality on keeps, on held-out labels. Drag the "
        "thresholds: below the left one is dropped, from the right one on kept, between them is "
        "the band for the judge.",
    )
    found = hydra.acceptance(calibration)
    if found is None:
        st.info("Not calibrated yet: run nmoe-data hydra calibrate.")
        return None
    found = dragged(found)
    shell.chart(acceptance_figure(found, view), "acceptance", "Acceptance by quality")
    shell.csv_button("acceptance", partial(hydra.acceptance_arrow, found))
    if found.threshold:
        consequences(found)
    return found


def dragged(found: Acceptance) -> Acceptance:
    """`found` with the thresholds of the slider; where it was not moved, with its own."""
    drop = found.thresholds.get("drop", 0.0)
    keep = found.thresholds.get("keep", 1.0)
    low, high = (min(1.0, max(0.0, round(value, 2))) for value in sorted((drop, keep)))
    own = low, high
    chosen = st.slider(
        "Thresholds", 0.0, 1.0, own, 0.01, key=THRESHOLDS, bind="query-params", width=520
    )
    if chosen == own:
        return found
    return replace(found, thresholds={"drop": chosen[0], "keep": chosen[1]})


def consequences(found: Acceptance) -> None:
    """What the thresholds mean: shares, and how good the kept part is."""
    drop, keep = found.thresholds.get("drop", 0.0), found.thresholds.get("keep", 1.0)
    kept, above = found.at("share kept", keep)[0], found.at("share kept", drop)[0]
    tiles(
        {
            "Kept": percent(kept),
            "Band, to the judge": percent(above - kept),
            "Dropped": percent(1 - above),
            "Precision of the kept": with_interval(found.at("precision", keep)),
            "Recall of the kept": with_interval(found.at("recall", keep)),
        }
    )


def percent(share: float) -> str:
    """A share in percent, a dash for none."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def with_interval(numbers: Triple) -> str:
    """A number with two digits, and its interval where it is known."""
    value, low, high = numbers
    if not math.isfinite(value):
        return "–"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if math.isfinite(low) else f"{value:.2f}"


def heads(item: HydraFolder, view: View) -> None:
    """Encoder, sizes and thresholds."""
    documents = mapping(item.content.get("documents"))
    tiles(
        {
            "Encoder": str(mapping(item.content.get("encoder")).get("spec", "–")),
            "Judge head": str(mapping(item.content.get("judge")).get("kind", "none")),
            **{
                f"{split.capitalize()} documents": formats.count(finite(count))
                for split, count in documents.items()
            },
        }
    )
    acceptance(item.content.get("calibration"), view)


def filtered(item: HydraFolder, view: View) -> None:
    """What was kept, who decided, and what was dropped."""
    counts = mapping(item.content.get("counts"))
    documents, kept = finite(counts.get("documents")), finite(counts.get("kept"))
    tiles(
        {
            "Documents": formats.count(documents),
            "Kept": formats.count(kept),
            "Share kept": formats.value(100 * kept / documents, 3) + " %"
            if kept is not None and documents
            else "–",
            "State": "unfinished" if "state" in item.content else "finished",
        }
    )
    decided = mapping(counts.get("decided"))
    left, right = st.columns([3, 2], gap="medium")
    with left:
        shell.section("Quality", "Documents by quality and decision; the lines are thresholds.")
        quality(item, view)
    with right:
        shell.section("Decided by", "The probe, the judge head, the judge itself, or the band.")
        st.dataframe(
            formats.table(["by", "documents"], sorted(decided.items())),
            hide_index=True,
            key="decided",
        )
    dropped = hydra.dropped_examples(item.folder)
    predicted(item, dropped, view)
    examples(dropped, "A random sample of what was dropped.")


def quality(item: HydraFolder, view: View) -> None:
    """The distribution of quality in the parts that are whole, with the thresholds to drag."""
    try:
        found = hydra.quality_counts(item.folder)
    except duckdb.Error:
        st.info("No part is whole yet. The first one appears here by itself.")
        return
    marks = hydra.acceptance(mapping(item.content.get("heads")).get("calibration"))
    marks = dragged(marks) if marks else None
    shell.chart(
        quality_figure(found, marks.thresholds if marks else {}, view),
        "quality",
        "Documents by quality and decision",
    )
    shell.csv_button("quality", lambda: hydra.quality_arrow(found))
    if marks:
        drop, keep = marks.thresholds.get("drop", 0.0), marks.thresholds.get("keep", 1.0)
        counts = hydra.band_counts(item.folder, drop, keep)
        st.caption(
            f"With these thresholds, by quality alone: {counts['drop']:,} dropped, "
            f"{counts['band']:,} in the band for the judge, {counts['keep']:,} kept."
        )


def predicted(item: HydraFolder, dropped: list[Example], view: View) -> None:
    """The scores that heads or judge gave in the parts that are whole."""
    names = list(dropped[0].scores) if dropped else []
    try:
        found = hydra.predicted_scores(item.folder, names)
    except duckdb.Error:
        return
    if found.count_DS.any():
        shell.section(
            "Scores",
            "Share of each score by dimension, rounded, of whoever spoke last. Heads that give "
            "one score to all learned nothing.",
        )
        shell.chart(
            score_figure(found, view), "predicted scores", "Share of each score by dimension"
        )
        shell.csv_button("predicted scores", lambda: hydra.scores_arrow(found))


def report(item: HydraFolder, view: View) -> None:
    """Agreement with intervals, acceptance, examples by band."""
    verdict = item.content.get("verdict")
    if isinstance(verdict, dict):
        show = st.success if verdict.get("verdict") == "agreement" else st.warning
        words = (str(verdict.get(key, "")) for key in ("verdict", "sentence"))
        show(formats.escaped(": ".join(words)))
    found = hydra.agreements(item.content)
    if found:
        shell.section(
            "Agreement",
            "On the untouched test part, with 95 % intervals. Zero means nothing learned.",
        )
        shell.chart(
            agreement_figure(found, view), "agreement", "Spearman's correlation by dimension"
        )
        shell.csv_button("agreement", lambda: hydra.agreements_arrow(found))
        st.dataframe(agreement_table(found), hide_index=True, key="agreement table")
    marks = acceptance(item.content.get("acceptance"), view)
    by_band(hydra.report_examples(item.content), marks)


def by_band(found: list[Example], marks: Acceptance | None) -> None:
    """Examples in the bands that the thresholds make, of the chosen band."""
    if marks and {"drop", "keep"} <= marks.thresholds.keys():
        drop, keep = marks.thresholds["drop"], marks.thresholds["keep"]
        found = [
            replace(example, band=hydra.band_of(example.quality, drop, keep))
            if math.isfinite(example.quality)
            else example
            for example in found
        ]
    counts = Counter(example.band for example in found)
    if not found:
        return
    band = st.segmented_control(
        "Examples",
        ["all", *BANDS],
        default="all",
        required=True,
        key=BAND,
        bind="query-params",
    )
    chosen = [example for example in found if band in ("all", example.band)]
    words = ", ".join(f"{counts[name]} {name}" for name in BANDS)
    examples(chosen, f"With scores and text; bands follow the thresholds: {words}.")
    if not chosen:
        st.info("No example lies in this band. Move the thresholds, or choose another band.")


def agreement_table(found: list[Agreement]) -> Any:
    """The numbers with their intervals in words."""
    rows = [
        [
            item.head,
            item.dimension,
            item.documents,
            *(interval(item.numbers.get(name)) for name in NUMBERS),
            item.verdict,
        ]
        for item in found
    ]
    return formats.table(["head", "dimension", "documents", *NUMBERS.values(), "verdict"], rows)


def interval(numbers: Triple | None) -> str:
    """A number and its interval, a dash for none."""
    if numbers is None or numbers[0] != numbers[0]:
        return "–"
    value, low, high = (formats.value(number, 3) for number in numbers)
    return f"{value} [{low}, {high}]"


def examples(found: list[Example], line: str) -> None:
    """Documents in folds, by band; their text is shown letter by letter."""
    if not found:
        return
    shell.section("Examples", line)
    order = {name: at for at, name in enumerate(BANDS)}
    with st.container(height=LIST_PX if len(found) > 8 else "content", border=False):
        for example in sorted(found, key=lambda item: order.get(item.band, len(order))):
            with st.expander(formats.escaped(f"{example.band}: {example.line}")):
                scores = (f"{name} {value:.2f}" for name, value in example.scores.items())
                st.caption(formats.escaped(", ".join(scores)))
                st.code(example.text, language=None, wrap_lines=True)


SHOWN = {"labels": labels, "heads": heads, "filter": filtered, "report": report}


def draw() -> None:
    """The chosen folder as of now."""
    found = shell.workspace().hydra()
    item = found.get(st.session_state.get("hydra_shown", ""))
    if item is None:
        st.warning("This folder is gone: it was moved or deleted while you looked at it.")
        return
    when = formats.moment(item.written_unix_s)
    st.caption(
        formats.escaped(f"{TITLES[item.kind]} · {item.key} · written {when:%Y-%m-%d %H:%M} UTC")
        if when
        else formats.escaped(f"{TITLES[item.kind]} · {item.key}")
    )
    if item.problem:
        st.error(formats.escaped(item.problem))
        return
    SHOWN[item.kind](item, View(dark=shell.is_dark()))


def page() -> None:
    """The choice of a folder, and what it holds."""
    found = shell.workspace().hydra()
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        shell.header("HYDRA", LINE)
    if not found:
        empty()
        return
    with right:
        item = choose(found)
    st.session_state["hydra_shown"] = item.key
    shell.notice_if(lambda: item.key not in shell.workspace().hydra())
    unfinished = "state" in item.content and item.content["state"] != "finished"
    st.fragment(draw, run_every=shell.REFRESH_S if unfinished else None)()


page()
