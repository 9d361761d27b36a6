"""A report says how well heads agree with labels, in numbers that another program confirms."""

import html.parser
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nmoe_data.hydra.filter.parts as parts
import numpy as np
import pytest
from hydra_heads import make_heads
from hydra_labels import noisy, write_label_folder
from inline_executor import inline
from judge_server import hidden_scores, random_scores
from nmoe_data.errors import DataError
from nmoe_data.hydra.documents import document_id, split_of
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.filter import FilterSettings, filter_corpus
from nmoe_data.hydra.heads import Heads, Probe, open_heads, save_heads
from nmoe_data.hydra.injection import Pair, write_pairs
from nmoe_data.hydra.labels import LABELS_NAME, Labels, read_labels, write_table
from nmoe_data.hydra.report import AGREES, NO_AGREEMENT, make_report
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score

__all__ = ["inline"]

NAMES = ("helpfulness", "correctness", "coherence", "complexity", "density")


@pytest.fixture
def texts(documents) -> list[str]:
    return [document.text for document in documents(400)]


def fitted_heads(folder: Path, texts: Sequence[str], *, judge: bool = False) -> Heads:
    """Heads whose probe was fitted to the hidden rule on the training part, by least squares."""
    heads = make_heads(folder, list(texts), judge=judge)
    train = [text for text in texts if split_of(document_id(text)) == "train"]
    features = open_encoder("hashed").encode(train).toarray().astype(np.float64)
    scores = np.array([hidden_scores(text) for text in train], np.float64)
    gram = features @ features.T + 3.0 * np.eye(len(train))
    weight = features.T @ np.linalg.solve(gram, scores - scores.mean(axis=0))
    probe = Probe(weight.astype(np.float32), scores.mean(axis=0).astype(np.float32))
    return save_heads(folder, replace(heads, probe=probe))


@pytest.fixture
def labelled(tmp_path: Path, texts: list[str]) -> Labels:
    return write_label_folder(
        tmp_path / "labels",
        texts,
        {"a": hidden_scores, "b": noisy(hidden_scores)},
        domain=lambda text: "web" if len(text) % 2 or "def " in text else "code",
    )


def test_part(labels: Labels) -> tuple[list[str], np.ndarray, list[str]]:
    scored = labels.scores()
    chosen = [i for i, split in enumerate(scored.splits) if split == "test"]
    return (
        [scored.texts[i] for i in chosen],
        scored.scores[chosen].astype(np.float64),
        [scored.strata[i] for i in chosen],
    )


test_part.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it


def probe_of(heads: Heads, texts: Sequence[str]) -> np.ndarray:
    features = open_encoder("hashed").encode(texts).toarray().astype(np.float64)
    return np.clip(features @ heads.probe.weight + heads.probe.bias, 0, 5)


def test_agreement_is_that_of_scipy_and_scikit_learn_on_the_test_part(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    heads = fitted_heads(tmp_path / "heads", texts)
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    test_texts, true, _ = test_part(labelled)
    predicted = probe_of(heads, test_texts)
    assert 40 < len(test_texts) < 90
    by_name = {row["dimension"]: row for row in content["agreement"] if row["head"] == "probe"}
    assert list(by_name) == [*NAMES, "quality"]
    for at, name in enumerate(NAMES):
        row, x, y = by_name[name], predicted[:, at], true[:, at]
        assert row["documents"] == len(test_texts)
        assert row["spearman"]["value"] == pytest.approx(spearmanr(x, y).statistic, abs=1e-4)
        assert row["pearson"]["value"] == pytest.approx(pearsonr(x, y).statistic, abs=1e-4)
        assert row["mae"]["value"] == pytest.approx(np.abs(x - y).mean(), abs=1e-4)
        assert row["f1_at_3"]["value"] == pytest.approx(f1_score(y >= 3, x >= 3), abs=1e-3)
        assert row["spearman"]["low"] < row["spearman"]["value"] < row["spearman"]["high"]
        assert row["verdict"] == AGREES
    quality = spearmanr(predicted.mean(axis=1), true.mean(axis=1)).statistic
    assert content["verdict"]["spearman"]["value"] == pytest.approx(quality, abs=1e-4)
    assert content["verdict"]["verdict"] == AGREES


def test_labels_without_a_signal_are_no_agreement_in_words(
    tmp_path: Path, texts: list[str]
) -> None:
    labels = write_label_folder(tmp_path / "labels", texts, {"a": random_scores})
    fitted_heads(tmp_path / "heads", texts)
    result = make_report(tmp_path / "heads", labels.path, tmp_path / "report")
    assert result.verdict == NO_AGREEMENT
    assert "interval includes zero" in result.sentence
    page = (tmp_path / "report" / "report.html").read_text()
    assert "No agreement." in page and "Do not filter by these heads" in page


def test_each_judge_against_the_other_and_its_cost(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    fitted_heads(tmp_path / "heads", texts)
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    assert [row["dimension"] for row in content["between_judges"]] == list(NAMES)
    assert all(row["judges"] == ["a", "b"] for row in content["between_judges"])
    one = np.array([hidden_scores(text) for text in texts], np.float64)
    other = np.array([noisy(hidden_scores)(text) for text in texts], np.float64)
    for at, row in enumerate(content["between_judges"]):
        expected = spearmanr(one[:, at], other[:, at]).statistic
        assert row["spearman"]["value"] == pytest.approx(expected, abs=1e-6)
    assert [(row["model"], row["scored"]) for row in content["labels"]["judges"]] == [
        ("a", 400),
        ("b", 400),
    ]
    assert content["labels"]["judges"][0]["prompt_tokens"] == 400


def test_status_classes_are_counted_and_unscored_is_no_score(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    rows = labelled.labels.to_pylist()
    for row in rows[:7]:
        row |= {"scores": None, "status": "refused", "detail": "refusal"}
    for row in rows[7:10]:
        row |= {"scores": None, "status": "unparsable", "detail": "cut"}
    write_table(labelled.path / LABELS_NAME, type(labelled.labels).from_pylist(
        rows, labelled.labels.schema))  # fmt: skip
    fitted_heads(tmp_path / "heads", texts)
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    assert content["labels"]["classes"] == [
        {"status": "refused", "detail": "refusal", "count": 7},
        {"status": "scored", "detail": "", "count": 790},
        {"status": "unparsable", "detail": "cut", "count": 3},
    ]


def test_length_and_domain_bias_are_those_of_the_errors(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    cut = [text[: 300 + 5 * (number % 200)] for number, text in enumerate(texts)]
    labels = write_label_folder(
        tmp_path / "cut",
        cut,
        {"a": hidden_scores},
        domain=lambda t: "web" if len(t) % 2 else "code",
    )
    heads = make_heads(tmp_path / "heads", cut, judge=False, seed=2)
    content = make_report(tmp_path / "heads", labels.path, tmp_path / "report").content
    test_texts, true, strata = test_part(labels)
    predicted = probe_of(heads, test_texts).mean(axis=1) / 5
    error = predicted - true.mean(axis=1) / 5
    length = [len(text) for text in test_texts]
    found = {row["of"]: row["spearman"]["value"] for row in content["bias"]["length"]}
    assert min(map(abs, found.values())) > 0.01
    assert found == pytest.approx(
        {
            "label": spearmanr(true.mean(axis=1), length).statistic,
            "prediction": spearmanr(predicted, length).statistic,
            "error": spearmanr(error, length).statistic,
            "size of error": spearmanr(np.abs(error), length).statistic,
        },
        abs=1e-3,
    )
    domains = {row["name"]: row for row in content["bias"]["domain"] if row["kind"] == "domain"}
    assert set(domains) == {"web", "code"}
    for name, row in domains.items():
        inside = error[[stratum.startswith(f"{name}/") for stratum in strata]]
        assert row["documents"] == len(inside)
        assert row["mean_error"]["value"] == pytest.approx(inside.mean(), abs=1e-5)
        assert row["mean_error"]["low"] < inside.mean() < row["mean_error"]["high"]
    assert {row["name"] for row in content["bias"]["domain"] if row["kind"] == "stratum"} == set(
        strata
    )


def test_compute_saved_and_bands_follow_from_the_thresholds(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    heads = fitted_heads(tmp_path / "heads", texts, judge=True)
    assert heads.calibration is not None
    # So high that good documents are among those that the probe drops.
    tau = float(np.quantile(probe_of(heads, texts).mean(axis=1) / 5, 0.7))
    calibration = replace(heads.calibration, tau_drop=tau, tau_keep=tau + 0.05, good=0.5)
    heads = save_heads(tmp_path / "heads", replace(heads, calibration=calibration))
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    test_texts, true, _ = test_part(labelled)
    spared = probe_of(heads, test_texts).mean(axis=1) / 5 < tau
    good = true.mean(axis=1) / 5 >= 0.5
    assert 0 < (good & spared).sum() < good.sum() < len(good)
    assert 0 < spared.sum() < len(spared)
    assert content["compute"] == pytest.approx(
        {
            "documents": len(test_texts),
            "spared": spared.mean(),
            "good_among_spared": good[spared].mean(),
            "good_lost": (good & spared).sum() / good.sum(),
        }
    )
    assert sum(row["documents"] for row in content["bands"]) == len(test_texts)
    assert {row["band"] for row in content["examples"]} >= {"drop", "keep"}
    assert content["verdict"]["head"] == "judge"


def pairs(defended: bool, shift: int, count: int) -> list[Pair]:
    """Clean and attacked scores; every fifth attacked one was refused."""
    draw = np.random.default_rng(int(defended))
    made = []
    for number in range(count):
        clean = tuple(int(score) for score in draw.integers(0, 4, 5))
        attacked = None if number % 5 == 0 else tuple(min(5, score + shift) for score in clean)
        status = "scored" if attacked else "refused"
        made.append(Pair(str(number), "a", "plea", defended, clean, attacked, "scored", status))
    return made


def test_the_injection_shift_is_that_of_scored_pairs_with_and_without_defence(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    fitted_heads(tmp_path / "heads", texts)
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    assert content["injection"] == []
    assert "Not measured" in (tmp_path / "report" / "report.html").read_text()
    made = [*pairs(True, 0, 50), *pairs(False, 2, 40)]
    write_pairs(labelled.path / "injection.parquet", made)
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    found = {(row["defended"], row["dimension"]): row for row in content["injection"]}
    assert set(found) == {(on, name) for on in (True, False) for name in ("all", *NAMES)}
    for defended, shift, count in ((True, 0.0, 40), (False, 2.0, 32)):
        row = found[defended, "all"]
        assert row["shift"]["value"] == row["shift"]["low"] == shift
        assert (row["pairs"], row["unscored"]) == (count, count // 4)


def test_a_filtered_corpus_is_told_and_must_fit(
    tmp_path: Path, texts: list[str], labelled: Labels, write_jsonl, inline: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fitted_heads(tmp_path / "heads", texts)
    source = write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    run = filter_corpus(str(source), tmp_path / "heads", tmp_path / "out", FilterSettings())
    made = make_report(
        tmp_path / "heads", labelled.path, tmp_path / "report", filtered=tmp_path / "out"
    )
    assert made.content["filter"]["counts"] == run.summary["counts"]
    assert made.content["filter"]["timing"]["documents"] == 400
    summary = json.loads((tmp_path / "out" / "filter.json").read_text())
    (tmp_path / "out" / "filter.json").write_text(json.dumps({**summary, "state": {}}))
    with pytest.raises(DataError, match=r"E-HYDRA-REPORT.*not finished"):
        make_report(tmp_path / "heads", labelled.path, tmp_path / "r", filtered=tmp_path / "out")
    summary["heads"]["hash"] = "0" * 64
    (tmp_path / "out" / "filter.json").write_text(json.dumps(summary))
    with pytest.raises(DataError, match=r"E-HYDRA-REPORT.*filtered by the heads 0000"):
        make_report(tmp_path / "heads", labelled.path, tmp_path / "r", filtered=tmp_path / "out")
    assert parts.PART_DOCUMENTS


def test_heads_of_another_rubric_are_refused(tmp_path: Path, texts: list[str]) -> None:
    labels = write_label_folder(tmp_path / "labels", texts, {"a": hidden_scores}, rubric="code")
    fitted_heads(tmp_path / "heads", texts)
    with pytest.raises(DataError, match=r"E-HYDRA-REPORT.*rubric prose.*by code"):
        make_report(tmp_path / "heads", labels.path, tmp_path / "report")


def test_labels_without_a_test_document_are_refused(tmp_path: Path, texts: list[str]) -> None:
    train = [text for text in texts if split_of(document_id(text)) == "train"]
    labels = write_label_folder(tmp_path / "labels", train, {"a": hidden_scores})
    fitted_heads(tmp_path / "heads", texts)
    with pytest.raises(DataError, match=r"E-HYDRA-REPORT.*test part"):
        make_report(tmp_path / "heads", labels.path, tmp_path / "report")


def test_uncalibrated_heads_are_measured_all_the_same(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    heads = fitted_heads(tmp_path / "heads", texts)
    save_heads(tmp_path / "heads", replace(heads, calibration=None))
    assert open_heads(tmp_path / "heads").calibration is None
    content = make_report(tmp_path / "heads", labelled.path, tmp_path / "report").content
    assert content["acceptance"] is None and content["bands"] == content["examples"] == []
    assert content["verdict"]["verdict"] == AGREES


class Tags(html.parser.HTMLParser):
    """Every element and address of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.names.add(tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "data", "action")
        ]


def test_the_page_is_whole_in_itself_and_runs_nothing(
    tmp_path: Path, texts: list[str], labelled: Labels
) -> None:
    fitted_heads(tmp_path / "heads", texts)
    make_report(tmp_path / "heads", labelled.path, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.addresses
    assert not tags.names & {"script", "link", "img", "iframe", "object", "base"}
    assert "url(" not in page and "@import" not in page
    assert {"svg", "table", "details"} <= tags.names
    assert "prefers-color-scheme:dark" in page


def test_text_of_documents_is_shown_and_never_run(tmp_path: Path, texts: list[str]) -> None:
    attack = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    marked = [f"{attack}{text}" for text in texts]
    labels = write_label_folder(
        tmp_path / "labels", marked, {"<b>judge</b>": hidden_scores}, domain=lambda t: "<i>web</i>"
    )
    fitted_heads(tmp_path / "heads", marked)
    make_report(tmp_path / "heads", labels.path, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "&lt;script&gt;alert" in page and "&lt;b&gt;judge" in page and "&lt;i&gt;web" in page
    assert not re.search(r"<script|<img|<b>|<i>", page)


def test_two_reports_of_the_same_folders_are_the_same(
    tmp_path: Path, texts: list[str], labelled: Labels, tree: Callable[[Path], dict[str, bytes]]
) -> None:
    fitted_heads(tmp_path / "heads", texts)
    for out in ("one", "two"):
        make_report(tmp_path / "heads", read_labels(labelled.path).path, tmp_path / out)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
