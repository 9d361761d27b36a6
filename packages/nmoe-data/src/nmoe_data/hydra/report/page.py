"""`report.html`: the content of report.json for a reader, in one file that asks nothing of anyone.

Everything that comes from documents, labels or names is escaped; charts are drawn as SVG.
"""

import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from nmoe_data.hydra.report.measures import AGREES, F1_THRESHOLDS, NO_AGREEMENT
from nmoe_data.hydra.report.svg import Interval, bar_chart, curve_chart, interval_chart

NOTHING = "–"
STYLE = resources.files("nmoe_data.hydra.report").joinpath("page.css")


def render_page(report: dict[str, Any]) -> str:
    """Returns the page of a report."""
    sections = [
        _verdict(report),
        _agreement(report),
        _judges(report),
        _labels(report),
        _acceptance(report),
        _compute(report),
        _bias(report),
        _injection(report),
        _filter(report),
        _examples(report),
        _origin(report),
    ]
    title = f"HYDRA report: {report['rubric']['name']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(title)}</title><style>{STYLE.read_text()}</style></head>"
        f"<body><main><h1>{_safe(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


def estimate_text(estimate: dict[str, Any], digits: int = 3) -> str:
    """Returns an estimate with its interval, or why there is none."""
    if estimate["value"] is None:
        return f"none ({estimate['reason']})"
    numbers = (estimate[key] for key in ("value", "low", "high"))
    value, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def _safe(value: object) -> str:
    return html.escape(str(value), quote=True)


def _section(title: str, line: str, *body: str) -> str:
    return f"<section><h2>{_safe(title)}</h2><p>{_safe(line)}</p>{''.join(body)}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join(f"<th>{_safe(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_safe(_shown(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


def _shown(value: object) -> object:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _verdict(report: dict[str, Any]) -> str:
    found = report["verdict"]
    kind = {AGREES: "good", NO_AGREEMENT: "bad"}.get(found["verdict"], "unknown")
    return (
        f'<p class="verdict {kind}"><strong>{_safe(found["verdict"].capitalize())}.</strong> '
        f"{_safe(found['sentence'])}</p>"
    )


def _agreement(report: dict[str, Any]) -> str:
    entries = report["agreement"]
    charts = []
    for head in dict.fromkeys(entry["head"] for entry in entries):
        rows = [_interval(entry) for entry in entries if entry["head"] == head]
        title = f"Spearman's correlation of the {head} with the labels"
        charts.append(f"<h3>{_safe(title)}</h3>{interval_chart(rows, -0.25, 1.0, title)}")
    f1 = [f"f1_at_{threshold:g}" for threshold in F1_THRESHOLDS]
    keys = ("spearman", "pearson", "mae", "kappa", *f1)
    names = [f"F1 at {threshold:g}" for threshold in F1_THRESHOLDS]
    table = _table(
        ["head", "dimension", "documents", "Spearman", "Pearson", "MAE", "kappa", *names, ""],
        (
            [
                entry["head"],
                entry["dimension"],
                entry["documents"],
                *(estimate_text(entry[key]) for key in keys),
                entry["verdict"],
            ]
            for entry in entries
        ),
    )
    line = (
        "On the test part of the labels, which neither training nor calibration saw. Intervals are "
        "95 % bootstrap over documents. Quality is times 5, to share the scale of the scores."
    )
    return _section("Agreement with the judge", line, *charts, table)


def _interval(entry: dict[str, Any]) -> Interval:
    found = entry["spearman"]
    good = entry["verdict"] == AGREES
    if found["value"] is None:
        return Interval(entry["dimension"], None, 0.0, 0.0, good, found["reason"])
    return Interval(entry["dimension"], found["value"], found["low"], found["high"], good)


def _judges(report: dict[str, Any]) -> str:
    entries = report["between_judges"]
    line = "How far judges agree with each other bounds what a head can reach."
    if not entries:
        return _section("Judge against judge", line, "<p>Not measured: there was one judge.</p>")
    table = _table(
        ["judges", "dimension", "documents", "exact", "Spearman", "MAE", "kappa"],
        (
            [
                " and ".join(entry["judges"]),
                entry["dimension"],
                entry["documents"],
                entry["exact"],
                *(estimate_text(entry[key]) for key in ("spearman", "mae", "kappa")),
            ]
            for entry in entries
        ),
    )
    return _section("Judge against judge", line, table)


def _labels(report: dict[str, Any]) -> str:
    found = report["labels"]
    total = max(sum(row["count"] for row in found["classes"]), 1)
    bars = [
        (
            " ".join(filter(None, [row["status"], row["detail"]])),
            row["count"] / total,
            f"{row['count']:,}",
        )
        for row in found["classes"]
    ]
    facts = _table(
        ["judge", "labels", "scored", "prompt tokens", "completion tokens", "cost", "latency s"],
        (
            [
                row["model"],
                row["labels"],
                row["scored"],
                row["prompt_tokens"],
                row["completion_tokens"],
                row["cost"],
                row["median_latency_s"],
            ]
            for row in found["judges"]
        ),
    )
    line = f"{found['documents']:,} documents; an unscored one is never a low score. {_rate(found)}"
    return _section("Labels", line, bar_chart(bars, "Labels by status"), facts)


def _rate(found: dict[str, Any]) -> str:
    rate = found["replies_per_s"]
    said = "" if rate is None else f"{rate:.1f} replies/s in the last run. "
    failures = ", ".join(f"{count:,} {kind}" for kind, count in found["failures"].items())
    said += f"On the way: {failures}. " if failures else ""
    return said + (f"Stopped by {found['stopped_by']}." if found["stopped_by"] else "")


def _acceptance(report: dict[str, Any]) -> str:
    found = report["acceptance"]
    line = "What keeping all documents from a quality on would keep, on the calibration labels."
    if found is None:
        return _section("Acceptance", line, "<p>Not calibrated.</p>")
    xs = [point["threshold"] for point in found["curve"]]
    curves = {
        name: [point[key][0] for point in found["curve"]]
        for name, key in (
            ("share kept", "share"),
            ("precision", "precision"),
            ("recall", "recall"),
        )
    }
    lines = {"drop": found["tau_drop"], "keep": found["tau_keep"]}
    chart = curve_chart(xs, curves, lines, "Acceptance by quality", "quality")
    pairs = [("all", found["tau_drop"], found["tau_keep"])]
    pairs += [(name, drop, keep) for name, (drop, keep) in found["domains"].items()]
    table = _table(["domain", "tau drop", "tau keep"], pairs)
    notes = "".join(f"<p>{_safe(note)}</p>" for note in found["notes"])
    bands = _table(
        ["band", "documents", "mean label quality"],
        ([row["band"], row["documents"], row["mean_label_quality"]] for row in report["bands"]),
    )
    return _section("Acceptance", line, chart, table, notes, "<h3>Test part by band</h3>", bands)


def _compute(report: dict[str, Any]) -> str:
    found = report["compute"]
    line = "What the probe decides alone needs no judge head."
    if found is None:
        text = "<p>Not measured: no judge head, or no calibration.</p>"
        return _section("Compute saved by the probe", line, text)
    rows = [
        ("test documents that the probe dropped alone", found["spared"]),
        ("of these, good by label", found["good_among_spared"]),
        ("of the good ones, lost to the probe", found["good_lost"]),
    ]
    return _section("Compute saved by the probe", line, _table(["", "share"], rows))


def _bias(report: dict[str, Any]) -> str:
    lengths = _table(
        ["of", "Spearman with length"],
        ([row["of"], estimate_text(row["spearman"])] for row in report["bias"]["length"]),
    )
    rows = [
        Interval(row["name"], *_numbers(row["mean_error"]), good=_has_zero(row["mean_error"]))
        for row in report["bias"]["domain"]
        if row["mean_error"]["value"] is not None
    ]
    chart = interval_chart(rows, -0.5, 0.5, "Mean error of quality") if rows else ""
    table = _table(
        ["", "name", "documents", "mean error of quality"],
        (
            [row["kind"], row["name"], row["documents"], estimate_text(row["mean_error"])]
            for row in report["bias"]["domain"]
        ),
    )
    line = "Prediction minus label; an interval that leaves out zero is a bias."
    return _section("Bias by length and domain", line, lengths, chart, table)


def _numbers(estimate: dict[str, Any]) -> tuple[float, float, float]:
    return estimate["value"], estimate["low"], estimate["high"]


def _has_zero(estimate: dict[str, Any]) -> bool:
    return bool(estimate["low"] <= 0 <= estimate["high"])


def _injection(report: dict[str, Any]) -> str:
    line = (
        "Documents with and without a command to score high, in pairs. A shift is the mean of "
        "attacked minus clean score; its interval should hold zero."
    )
    entries = report["injection"]
    if not entries:
        text = "<p>Not measured: run hydra label with --injection.</p>"
        return _section("Injection", line, text)
    table = _table(
        ["judge", "defence", "dimension", "pairs", "unscored pairs", "mean shift"],
        (
            [
                row["model"],
                "on" if row["defended"] else "off",
                row["dimension"],
                row["pairs"],
                row["unscored"],
                estimate_text(row["shift"]),
            ]
            for row in entries
        ),
    )
    return _section("Injection", line, table)


def _filter(report: dict[str, Any]) -> str:
    found = report["filter"]
    line = "What filtering the corpus did."
    if found is None:
        return _section("Filter", line, "<p>Not given (--filtered).</p>")
    counts = found["counts"]
    total = max(counts["documents"], 1)
    bars = [
        (name, count / total, f"{count:,} ({count / total:.1%})")
        for name, count in counts["decided"].items()
    ]
    facts = [
        ("documents", counts["documents"]),
        ("kept", counts["kept"]),
        ("share kept", found["rates"]["kept"]),
        ("spared by the probe", found["rates"]["spared_by_probe"]),
        ("rejected records", sum(counts["rejected"].values())),
        ("documents per second", found["timing"].get("documents_per_s")),
        ("requests to the judge", found["llm"].get("requests")),
        ("cost of the judge", found["llm"].get("cost")),
    ]
    domains = [(name, row["documents"], row["kept"]) for name, row in counts["domains"].items()]
    return _section(
        "Filter",
        line,
        bar_chart(bars, "Documents by who decided"),
        _table(["", ""], facts),
        _table(["domain", "documents", "kept"], domains),
    )


def _examples(report: dict[str, Any]) -> str:
    line = "Of each band the documents predicted best and worst."
    entries = report["examples"]
    if not entries:
        return _section("Examples", line, "<p>No bands without a calibration.</p>")
    return _section("Examples", line, *map(_example, entries))


def _example(entry: dict[str, Any]) -> str:
    scores = _table(
        ["", *entry["scores"]],
        [["predicted", *entry["scores"].values()], ["label", *entry["labels"].values()]],
    )
    more = " …" if entry["characters"] > len(entry["text"]) else ""
    head = (
        f"{entry['band']}: quality {entry['quality']:.2f}, by label "
        f"{entry['label_quality']:.2f}; {entry['domain']}, {entry['characters']:,} characters"
    )
    return (
        f"<details><summary>{_safe(head)}</summary>{scores}"
        f"<pre>{_safe(entry['text'] + more)}</pre></details>"
    )


def _origin(report: dict[str, Any]) -> str:
    rows = [(name, value) for name, value in report["origin"].items()]
    return _section("What this was made from", "Hashes and versions.", _table(["", ""], rows))
