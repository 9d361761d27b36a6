"""The label job: a sample of the sources, labels of it by every judge, the LABELS folder.

A run that was stopped goes on when it is started again: the sample is on disk, and every reply
that was paid is in the cache. `labels.parquet` is then the same as of a run never stopped.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import nmoe_data
from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, only_writer, os_errors
from nmoe_data.hydra.batches import BatchProgress, fill_from_batches
from nmoe_data.hydra.client import JudgeSettings, Usage
from nmoe_data.hydra.client.control import RunControl
from nmoe_data.hydra.documents import Document, Sample, SampleProgress, sample_documents
from nmoe_data.hydra.injection import (
    Pair,
    measure_injection,
    pair_of,
    read_pairs,
    write_pairs,
)
from nmoe_data.hydra.labels import (
    CACHE_NAME,
    INJECTION_NAME,
    LABELS_NAME,
    LABELS_SCHEMA,
    RUBRIC_NAME,
    SAMPLE_NAME,
    SCHEMA_VERSION,
    SCORED,
    SUMMARY_NAME,
    Label,
    read_json,
    read_sampled,
    read_table,
    write_documents,
    write_labels,
)
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.rubric import Rubric
from nmoe_data.hydra.session import GradingProgress, check_judges, open_session
from nmoe_data.prep.state import check_same_arguments
from nmoe_data.sources import list_files, listing_hash, source_list

FINISHED = "finished"
UNFINISHED = "unfinished"
logger = logging.getLogger("nmoe_data")

Progress = Callable[[SampleProgress | BatchProgress | GradingProgress], None]


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """What a label job is to do.

    sample: documents. seed: chooses them. text_field: of JSON records and Parquet. max_characters:
    of a document that a judge sees. max_cost, max_tokens: of everything spent for the folder, None
    for no limit. batch: by the judges' batch interface first. injection: documents that are also
    graded with an attack in them, with and without the defence.
    """

    sample: int = 2000
    seed: int = 0
    text_field: str = "text"
    max_characters: int = PromptSettings().max_characters
    max_cost: float | None = None
    max_tokens: int | None = None
    batch: bool = False
    injection: int = 0


@dataclass(frozen=True, slots=True)
class LabelResult:
    """What a label job left.

    summary: label.json. scored: documents times judges. stopped_by: None, "interrupted", or the
    limit that ended the run.
    """

    out: Path
    summary: dict[str, Any]
    scored: int
    stopped_by: str | None


@dataclass(frozen=True, slots=True)
class _Work:
    labels: list[Label]
    pairs: list[Pair]
    usage: Usage
    control: RunControl
    seconds: float


def label(
    source: str | Sequence[str],
    out: Path,
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    settings: LabelSettings,
    progress: Progress | None = None,
) -> LabelResult:
    """Samples the sources, has the sample graded by every judge, and writes the LABELS folder.

    Labels of other models that are in the folder already stay. An unfinished run goes on.

    Raises DataError: for arguments and folders that do not work (E-ARGUMENT, E-OUT-DIFFERS,
    E-SOURCE-CHANGED, E-OUT-BUSY, and those of `sample_documents`, `open_session` and `os_errors`);
    E-HYDRA-NO-LABELS if no document was scored; and, after everything paid has been written, for
    what ended the run early: E-HYDRA-QUOTA, E-HYDRA-UNAUTHORIZED, E-HYDRA-RATE, E-HYDRA-NO-REPLY,
    E-HYDRA-BATCH, E-HYDRA-CACHE, E-DISK-FULL.
    """
    if settings.injection < 0 or settings.max_characters < 1:
        what = f"injection is {settings.injection}, max-characters {settings.max_characters}"
        raise DataError("E-ARGUMENT", what, "give at least 0 and at least 1")
    # Before the sources are read, which may take long.
    check_judges(judges, settings.max_cost, settings.max_tokens)
    with os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        with only_writer(out):
            documents = _sampled(source, out, rubric, settings, progress)
            work = asyncio.run(_work(documents, out, judges, rubric, settings, progress))
            return _write(out, documents, judges, rubric, settings, work)


def _sampled(
    source: str | Sequence[str],
    out: Path,
    rubric: Rubric,
    settings: LabelSettings,
    progress: Progress | None,
) -> list[Document]:
    """Returns the sample, drawn now or by an earlier run with the same arguments."""
    arguments = {
        "sources": source_list(source),
        "source_files": listing_hash(list_files(source, [out])),
        "sample": settings.sample,
        "seed": settings.seed,
        "text_field": settings.text_field,
        "rubric": rubric.hash,
    }
    if (out / SAMPLE_NAME).is_file():
        before = read_json(out / SAMPLE_NAME)
        check_same_arguments(out, {name: before.get(name) for name in arguments}, arguments)
        return read_sampled(out)
    sample = sample_documents(
        source,
        settings.sample,
        settings.seed,
        text_field=settings.text_field,
        exclude=[out],
        progress=progress,
    )
    atomic_write(out / RUBRIC_NAME, rubric.toml)
    write_documents(out, sample.documents)
    # Last: a folder with a sample.json has the rest.
    _write_json(out / SAMPLE_NAME, {**arguments, **_described(sample)})
    return sample.documents


def _described(sample: Sample) -> dict[str, Any]:
    sampled = sample.sampled
    strata = {
        name: {"seen": seen, "sampled": sampled.get(name, 0)} for name, seen in sample.seen.items()
    }
    return {"documents": len(sample.documents), "strata": strata, "rejected": sample.rejected}


async def _work(
    documents: list[Document],
    out: Path,
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    settings: LabelSettings,
    progress: Progress | None,
) -> _Work:
    started_s = time.monotonic()
    prompts = PromptSettings(settings.max_characters, settings.seed)
    async with open_session(
        judges,
        rubric,
        out / CACHE_NAME,
        max_cost=settings.max_cost,
        max_tokens=settings.max_tokens,
        progress=progress,
    ) as session:
        if settings.batch:
            await fill_from_batches(session, documents, prompts, out, progress)
        labels = await session.grade(documents, prompts)
        pairs = await measure_injection(session, documents[: settings.injection], prompts)
        seconds = time.monotonic() - started_s
        return _Work(labels, pairs, session.budget.spent, session.control, seconds)


def _write(
    out: Path,
    documents: list[Document],
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    settings: LabelSettings,
    work: _Work,
) -> LabelResult:
    before = read_json(out / SUMMARY_NAME) if (out / SUMMARY_NAME).is_file() else {}
    labels = _with_earlier(out, documents, judges, work.labels)
    write_labels(out, labels)
    if settings.injection:
        write_pairs(out / INJECTION_NAME, _with_earlier_pairs(out, judges, work))
    summary = _summary(documents, judges, rubric, settings, work, labels, before)
    _write_json(out / SUMMARY_NAME, summary)
    scored = sum(label.status == SCORED for label in work.labels)
    if work.control.error is not None:
        raise work.control.error
    if not scored and work.control.stopped_by is None:
        if work.control.unanswered is not None and not work.control.replies:
            raise work.control.unanswered
        details = Counter(label.detail for label in work.labels)
        classes = ", ".join(f"{detail} {count}" for detail, count in details.most_common())
        raise DataError(
            "E-HYDRA-NO-LABELS",
            f"none of {len(documents)} documents was scored ({classes})",
            "look at one reply of the judge; another model or --no-schema may do",
        )
    return LabelResult(out, summary, scored, work.control.stopped_by)


def _with_earlier(
    out: Path, documents: list[Document], judges: Sequence[JudgeSettings], labels: list[Label]
) -> list[Label]:
    """Returns the labels and those in the folder that they do not replace, by document and model.

    These are of models that were not asked now, and what a run that ended early did not come to.
    """
    places = {document.id: number for number, document in enumerate(documents)}
    all_labels = {(places[label.document_id], label.model): label for label in labels}
    asked = {judge.model for judge in judges}
    prompts = {label.prompt_hash for label in labels}
    if (out / LABELS_NAME).is_file():
        for row in read_table(out / LABELS_NAME, LABELS_SCHEMA).to_pylist():
            if row["model"] not in asked or not prompts or row["prompt_hash"] in prompts:
                key = (places[row["document_id"]], row["model"])
                all_labels.setdefault(key, _label_of(row))
    return [all_labels[key] for key in sorted(all_labels)]


def _with_earlier_pairs(out: Path, judges: Sequence[JudgeSettings], work: _Work) -> list[Pair]:
    """Returns the pairs in the folder that those of this run do not replace, and then these."""
    if not (out / INJECTION_NAME).is_file():
        return work.pairs
    asked = {judge.model for judge in judges}
    new = {(pair.document_id, pair.model, pair.defended) for pair in work.pairs}
    early = work.control.stopped_by is not None
    earlier = [
        pair
        for pair in map(pair_of, read_pairs(out / INJECTION_NAME).to_pylist())
        if pair.model not in asked
        or (early and (pair.document_id, pair.model, pair.defended) not in new)
    ]
    return earlier + work.pairs


def _label_of(row: dict[str, Any]) -> Label:
    lists = {name: row[name] and tuple(row[name]) for name in ("scores", "expected")}
    return Label(**{**row, **lists})


def _summary(
    documents: list[Document],
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    settings: LabelSettings,
    work: _Work,
    labels: list[Label],
    before: dict[str, Any],
) -> dict[str, Any]:
    control = work.control
    asked = {judge.model for judge in judges}
    others = [judge for judge in before.get("judges", []) if judge["model"] not in asked]
    run = {
        "requests": control.requests,
        "replies": control.replies,
        "seconds": work.seconds,
        "replies_per_s": control.replies / work.seconds,
        "failures": dict(sorted(control.events.items())),
    }
    return {
        "state": FINISHED if control.stopped_by is None else UNFINISHED,
        "stopped_by": control.stopped_by,
        "error": control.error.code if control.error else None,
        "version": nmoe_data.__version__,
        "rubric": {"name": rubric.name, "hash": rubric.hash},
        "documents": len(documents),
        "judges": [*others, *map(_described_judge, judges)],
        "counts": _counts(labels),
        "usage": {
            "prompt_tokens": work.usage.prompt_tokens,
            "completion_tokens": work.usage.completion_tokens,
            "cost": work.usage.cost,
        },
        "budget": {"max_cost": settings.max_cost, "max_tokens": settings.max_tokens},
        # A run that only found what was there says nothing about the rate.
        "run": run if control.requests or "run" not in before else before["run"],
    }


def _described_judge(judge: JudgeSettings) -> dict[str, Any]:
    return {
        "name": judge.name,
        "model": judge.model,
        "host": judge.host,
        "schema": judge.schema,
        "logprobs": judge.logprobs,
        "temperature": judge.temperature,
        "reply_tokens": judge.reply_tokens,
        "price_in": judge.price_in,
        "price_out": judge.price_out,
    }


def _counts(labels: list[Label]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for model in sorted({label.model for label in labels}):
        of_model = [label for label in labels if label.model == model]
        details = Counter(label.detail for label in of_model if label.detail)
        counts[model] = {
            "status": dict(sorted(Counter(label.status for label in of_model).items())),
            "detail": dict(sorted(details.items())),
            "attempts": sum(label.attempts for label in of_model),
            "prompt_tokens": sum(label.prompt_tokens for label in of_model),
            "completion_tokens": sum(label.completion_tokens for label in of_model),
            "cost": sum(label.cost for label in of_model),
        }
    return counts


def _write_json(path: Path, content: dict[str, Any]) -> None:
    versioned = {"schema_version": SCHEMA_VERSION, **content}
    atomic_write(path, orjson.dumps(versioned, option=orjson.OPT_INDENT_2))
