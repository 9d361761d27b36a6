"""A report from heads, labels and, if given, a filtered corpus: report.json and report.html."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

import nmoe_data
from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, only_writer, os_errors
from nmoe_data.hydra.agreement import LEVEL, RESAMPLES, between_judges
from nmoe_data.hydra.filter.result import SUMMARY_NAME, TIMING_NAME
from nmoe_data.hydra.heads import Heads, open_heads
from nmoe_data.hydra.labels import Labels, read_labels
from nmoe_data.hydra.report.costs import injection_section, label_section
from nmoe_data.hydra.report.graded import Graded, grade_test_part
from nmoe_data.hydra.report.measures import (
    AGREES,
    NO_AGREEMENT,
    acceptance_section,
    agreement_section,
    band_section,
    compute_section,
    domain_section,
    example_section,
    length_section,
)
from nmoe_data.hydra.report.page import estimate_text, render_page

REPORT_NAME, PAGE_NAME = "report.json", "report.html"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReportResult:
    """A written report. content: report.json. verdict, sentence: on the quality of the last head.

    spearman: its rank correlation with the labels, None if there is none.
    """

    out: Path
    content: dict[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.content["verdict"]["verdict"])

    @property
    def sentence(self) -> str:
        return str(self.content["verdict"]["sentence"])

    @property
    def spearman(self) -> float | None:
        value = self.content["verdict"]["spearman"]["value"]
        return None if value is None else float(value)


def make_report(
    heads: Path,
    labels: Path,
    out: Path,
    *,
    filtered: Path | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> ReportResult:
    """Measures the heads on the test part of the labels and writes `out`/report.{json,html}.

    filtered: the folder of a finished filter run. device: of a neural encoder. seed: of the
    bootstrap.

    Raises DataError: E-HYDRA-REPORT for parts that do not fit together or a filter run that is not
    finished, and those of `read_labels`, `open_heads`, `open_encoder` and `os_errors`.
    """
    read, opened = read_labels(labels), open_heads(heads)
    graded = grade_test_part(read, opened, device)
    content = _content(read, opened, graded, seed)
    content["filter"] = None if filtered is None else _filter_section(filtered, opened)
    # As it reads back: what is not a number is null, on the page too.
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    content = orjson.loads(data)
    with os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        with only_writer(out):
            atomic_write(out / PAGE_NAME, render_page(content).encode())
            atomic_write(out / REPORT_NAME, data)
    return ReportResult(out, content)


def _content(labels: Labels, heads: Heads, graded: Graded, seed: int) -> dict[str, Any]:
    names = list(heads.rubric.names)
    agreement = agreement_section(graded, names, seed)
    return {
        "schema_version": SCHEMA_VERSION,
        "rubric": {"name": heads.rubric.name, "hash": heads.rubric.hash, "dimensions": names},
        "verdict": _verdict(agreement, graded.final),
        "agreement": agreement,
        "between_judges": between_judges(labels.labels, names, seed=seed),
        "labels": label_section(labels),
        "acceptance": acceptance_section(heads.calibration),
        "bands": band_section(graded),
        "compute": compute_section(graded, heads.calibration),
        "bias": {"length": length_section(graded, seed), "domain": domain_section(graded, seed)},
        "injection": injection_section(labels.path, names, seed),
        "examples": example_section(graded, names),
        "origin": {
            "tool": f"nmoe-data {nmoe_data.__version__}",
            "date": datetime.now(UTC).date().isoformat(),
            "heads": heads.hash,
            "encoder": heads.encoder_spec,
            "encoder hash": heads.encoder_hash,
            "rubric hash": heads.rubric.hash,
            "interval": f"{LEVEL:.0%} bootstrap of {RESAMPLES} resamples, seed {seed}",
        },
    }


def _verdict(agreement: list[dict[str, Any]], head: str) -> dict[str, Any]:
    """Returns what to say first: whether the last head's quality follows the labels at all."""
    (entry,) = (row for row in agreement if (row["head"], row["dimension"]) == (head, "quality"))
    return {
        "verdict": entry["verdict"],
        "head": head,
        "spearman": entry["spearman"],
        "sentence": _sentence(entry, agreement),
    }


def _sentence(entry: dict[str, Any], agreement: list[dict[str, Any]]) -> str:
    found = orjson.loads(orjson.dumps(entry["spearman"]))
    measured = (
        f"Spearman {estimate_text(found)} between the {entry['head']}'s quality and the labels of "
        f"{entry['documents']} test documents"
    )
    weak = [
        row["dimension"]
        for row in agreement
        if row["head"] == entry["head"] and row["verdict"] != AGREES and row is not entry
    ]
    if entry["verdict"] == NO_AGREEMENT:
        return f"{measured}: the interval includes zero. Do not filter by these heads."
    if weak:
        return f"{measured}; none shown for {', '.join(weak)}."
    return f"{measured}."


def _filter_section(folder: Path, heads: Heads) -> dict[str, Any]:
    path = folder / SUMMARY_NAME
    with os_errors("read", path):
        data = path.read_bytes()
        timing = folder / TIMING_NAME
        measured = orjson.loads(timing.read_bytes()) if timing.is_file() else {}
    try:
        summary = orjson.loads(data)
        unfinished, hash = "state" in summary, summary["heads"]["hash"]
        counts = {key: summary[key] for key in ("counts", "rates", "llm", "settings")}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise DataError(
            "E-HYDRA-REPORT", f"{path} cannot be understood", "name a folder of hydra filter"
        ) from None
    if unfinished:
        raise DataError(
            "E-HYDRA-REPORT",
            f"the filter run in {folder} is not finished",
            "run the same `nmoe-data hydra filter` command again to its end",
        )
    if hash != heads.hash:
        raise DataError(
            "E-HYDRA-REPORT",
            f"{folder} was filtered by the heads {hash[:16]}, these are {heads.hash[:16]}",
            "name the heads that it was filtered by",
        )
    return {**counts, "timing": measured}
