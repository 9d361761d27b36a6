"""A LABELS folder as `hydra label` leaves it, made without a judge: labels by a rule."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from judge_server import draw
from nmoe_data.hydra.documents import Document, document_id, stratum_of
from nmoe_data.hydra.labels import (
    RUBRIC_NAME,
    SAMPLE_NAME,
    SCHEMA_VERSION,
    SUMMARY_NAME,
    Label,
    Labels,
    read_labels,
    write_documents,
    write_labels,
)
from nmoe_data.hydra.rubric import load_rubric

Rule = Callable[[str], tuple[int, ...]]


def noisy(rule: Rule, chance: float = 0.2) -> Rule:
    """The rule with each score off by one with this chance, by the text alone."""

    def scores(text: str) -> tuple[int, ...]:
        per_mille = round(1000 * chance)
        shifts = (draw("shift", text, at, 2000) for at in range(16))
        steps = [0 if s >= 2 * per_mille else 1 if s % 2 else -1 for s in shifts]
        pairs = zip(rule(text), steps, strict=False)
        return tuple(min(5, max(0, score + step)) for score, step in pairs)

    return scores


def write_label_folder(
    folder: Path,
    texts: Sequence[str],
    rules: dict[str, Rule],
    *,
    domain: Callable[[str], str] = lambda text: "pieces",
    rubric: str = "prose",
) -> Labels:
    """Write labels of `texts` by a rule per model and open them."""
    folder.mkdir(parents=True)
    meaning = load_rubric(rubric)
    documents = [
        Document(document_id(text), text, "pieces", at, stratum_of(domain(text), text))
        for at, text in enumerate(texts)
    ]
    counts = Counter(document.stratum for document in documents)
    strata = {name: {"seen": count, "sampled": count} for name, count in counts.items()}
    (folder / RUBRIC_NAME).write_bytes(meaning.toml)
    for name, content in ((SAMPLE_NAME, {"strata": strata}), (SUMMARY_NAME, {})):
        (folder / name).write_text(json.dumps({"schema_version": SCHEMA_VERSION, **content}))
    write_documents(folder, documents)
    write_labels(
        folder,
        [
            Label(
                document_id=document.id,
                rubric_hash=meaning.hash,
                model=model,
                prompt_hash="0" * 64,
                scores=rule(document.text),
                expected=None,
                reason="because",
                status="scored",
                detail="",
                prompt_tokens=1,
                completion_tokens=1,
                cost=0.0,
                latency_s=0.1,
                attempts=1,
            )
            for model, rule in rules.items()
            for document in documents
        ],
    )
    return read_labels(folder)
