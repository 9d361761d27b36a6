"""A filter run decides as its heads and thresholds say, and writes down what it did."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nmoe_data.hydra.filter.parts as parts
import nmoe_data.hydra.filter.plan as plan
import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from hydra_heads import make_heads
from inline_executor import inline
from nmoe_data.errors import DataError
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.filter import FilterProgress, FilterResult, FilterSettings, filter_corpus
from nmoe_data.hydra.heads import Heads, save_heads
from nmoe_data.sources import Document, list_files, read_documents

__all__ = ["inline"]
pytestmark = pytest.mark.usefixtures("inline")


@pytest.fixture
def texts(make_texts: Callable[..., list[str]]) -> list[str]:
    return make_texts(300)


@pytest.fixture
def source(tmp_path: Path, texts: list[str], write_jsonl: Callable[..., Path]) -> Path:
    """Two JSONL files, a text file, and a binary."""
    write_jsonl(tmp_path / "in" / "a.jsonl", texts[:200])
    with (tmp_path / "in" / "a.jsonl").open("ab") as file:
        file.write(b"[]\n{\n")
    write_jsonl(tmp_path / "in" / "b.jsonl", texts[200:299])
    (tmp_path / "in" / "c.txt").write_text(texts[299])
    (tmp_path / "in" / "d.txt").write_bytes(b"\0")
    return tmp_path / "in"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 120)


def run(source: Path, heads: Path, out: Path, **named: Any) -> FilterResult:
    return filter_corpus(str(source), heads, out, FilterSettings(**named))


def kept_rows(out: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted((out / "kept").iterdir()):
        with path.open("rb") as file:
            data = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
        found += [json.loads(line) for line in data.splitlines()]
    return found


def score_rows(out: Path) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((out / "scores").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]


def by_hand(heads: Heads, texts: Sequence[str], band: str) -> list[tuple[str, str, float]]:
    """(decision, decided_by, quality) of each text, one at a time, in plain double precision."""
    assert heads.calibration is not None
    encoder = open_encoder("hashed")
    found = []
    for text in texts:
        row = np.asarray(encoder.encode([text]).todense(), np.float64)[0]
        raw = row @ heads.probe.weight + heads.probe.bias
        quality, by = float(np.clip(raw, 0, 5).mean() / 5), "probe"
        if quality >= heads.calibration.tau_drop and heads.judge is not None:
            x = (row @ heads.judge.projection - heads.judge.mean) / heads.judge.scale
            ((weight, bias),) = heads.judge.layers
            quality, by = float(np.clip(raw + x @ weight + bias, 0, 5).mean() / 5), "judge"
        decision = "keep" if quality >= heads.calibration.tau_keep else "drop"
        if heads.calibration.tau_drop <= quality < heads.calibration.tau_keep:
            decision, by = band, "band"
        found.append((decision, by, quality))
    return found


@pytest.mark.parametrize("judge", [True, False])
@pytest.mark.parametrize("band", ["keep", "drop"])
def test_each_document_is_decided_as_worked_out_by_hand(
    tmp_path: Path, source: Path, texts: list[str], judge: bool, band: str
) -> None:
    heads = make_heads(tmp_path / "heads", texts, judge=judge)
    run(source, tmp_path / "heads", tmp_path / "out", band=band)
    expected = by_hand(heads, texts, band)
    assert set(Counter((decision, by) for decision, by, _ in expected)) == (
        {("drop", "probe"), ("keep", "judge"), ("drop", "judge"), (band, "band")}
        if judge
        else {("drop", "probe"), ("keep", "probe"), (band, "band")}
    )
    rows = score_rows(tmp_path / "out")
    assert [(row["decision"], row["decided_by"]) for row in rows] == [row[:2] for row in expected]
    for row, (_, by, quality) in zip(rows, expected, strict=True):
        assert row["quality"] == pytest.approx(quality, abs=1e-5)
        assert (row["judge_quality"] is None) == (not judge or (by == "probe"))
        assert float(np.mean(row["scores"])) / 5 == pytest.approx(quality, abs=1e-5)
    kept = kept_rows(tmp_path / "out")
    pairs = zip(texts, expected, strict=True)
    assert [row["text"] for row in kept] == [text for text, row in pairs if row[0] == "keep"]
    assert [row["decided_by"] for row in kept] == [row[1] for row in expected if row[0] == "keep"]


def test_rows_say_where_their_document_stands(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts)
    run(source, tmp_path / "heads", tmp_path / "out")
    files = list_files(str(source))
    places = {
        (f"{source}/{files[item.source_index].name}", item.byte_offset): item.text
        for item in read_documents(files)
        if isinstance(item, Document)
    }
    rows = score_rows(tmp_path / "out")
    assert [(row["source"], row["offset"]) for row in rows] == list(places)
    assert [row["bytes"] for row in rows] == [len(text.encode()) for text in places.values()]
    for row in kept_rows(tmp_path / "out"):
        assert places[row["source"], row["offset"]] == row["text"]
        assert set(row) == {
            "text", "id", "source", "offset", "quality", "scores", "decided_by"
        }  # fmt: skip
    assert len({row["id"] for row in rows}) == len(set(places.values()))


def test_parts_and_counts_add_up(tmp_path: Path, source: Path, texts: list[str]) -> None:
    make_heads(tmp_path / "heads", texts)
    summary = run(source, tmp_path / "heads", tmp_path / "out").summary
    rows, kept = score_rows(tmp_path / "out"), kept_rows(tmp_path / "out")
    counts = summary["counts"]
    assert counts["documents"] == len(rows) == 300
    assert counts["kept"] == len(kept) == sum(row["decision"] == "keep" for row in rows)
    assert counts["decided"] == Counter(f"{row['decided_by']} {row['decision']}" for row in rows)
    assert counts["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert counts["kept_bytes"] == sum(len(row["text"].encode()) for row in kept)
    assert counts["domains"] == {"in": {"documents": 300, "kept": len(kept)}}
    assert counts["rejected"] == {"invalid-json": 1, "not-an-object": 1, "nul-byte": 1}
    assert summary["rates"]["kept"] == len(kept) / 300
    sizes = [
        pq.read_metadata(path).num_rows for path in sorted((tmp_path / "out/scores").iterdir())
    ]
    assert len(sizes) == 3 and all(size >= 120 for size in sizes[:-1])
    assert "state" not in summary and not (tmp_path / "out" / "work").exists()


def test_bad_records_are_named_and_never_fatal(
    tmp_path: Path, source: Path, texts: list[str], rejected: Callable[..., list[Any]]
) -> None:
    make_heads(tmp_path / "heads", texts)
    run(source, tmp_path / "heads", tmp_path / "out")
    size = (source / "a.jsonl").stat().st_size
    assert rejected(tmp_path / "out") == [
        ("a.jsonl", size - 5, "not-an-object"),
        ("a.jsonl", size - 2, "invalid-json"),
        ("d.txt", 0, "nul-byte"),
    ]


def test_the_dropped_sample_is_bounded_random_and_seeded(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts)

    def key(seed: int, row: dict[str, Any]) -> int:
        place = f"{seed}\0{row['id']}\0{row['source']}\0{row['offset']}".encode()
        digest = hashlib.blake2b(place, digest_size=8, person=b"hydra dropped").digest()
        return int.from_bytes(digest, "little")

    drawn = {}
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        run(source, tmp_path / "heads", out, dropped_sample=20, seed=seed)
        sample = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
        rows = [row for row in score_rows(out) if row["decision"] == "drop"]
        dropped = {row["id"] for row in rows}
        smallest = sorted(rows, key=lambda row: key(seed, row))[:20]
        assert [row["id"] for row in sample] == [row["id"] for row in smallest]
        drawn[seed] = {row["id"] for row in sample}
        assert len(sample) == 20 and drawn[seed] <= dropped and len(dropped) > 60
        assert all(row["text"] in texts and not row["cut"] for row in sample)
        # From all over the corpus: by chance all twenty are of one half once in 500,000 times.
        places = [number for number, row in enumerate(rows) if row["id"] in drawn[seed]]
        assert min(places) < len(rows) // 2 < max(places)
    assert drawn[1] != drawn[2]


def test_a_domain_with_thresholds_of_its_own_is_cut_by_them(
    tmp_path: Path, texts: list[str], write_jsonl: Callable[..., Path]
) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", texts) for name in ("web", "code")]
    heads = make_heads(tmp_path / "heads", texts, judge=False)
    assert heads.calibration is not None
    save_heads(
        tmp_path / "heads",
        replace(heads, calibration=replace(heads.calibration, domains={"code": (1.0, 1.0)})),
    )
    result = filter_corpus(
        [str(path) for path in paths], tmp_path / "heads", tmp_path / "out", FilterSettings()
    )
    domains = result.summary["counts"]["domains"]
    assert domains["code"] == {"documents": 300, "kept": 0}
    assert domains["web"]["kept"] > 100


def test_a_finished_run_is_returned_as_it_is(
    tmp_path: Path, source: Path, texts: list[str], tree: Callable[[Path], dict[str, bytes]]
) -> None:
    make_heads(tmp_path / "heads", texts)
    first = run(source, tmp_path / "heads", tmp_path / "out")
    before = tree(tmp_path / "out")
    again = run(source, tmp_path / "heads", tmp_path / "out", workers=2)
    assert again.reused and not first.reused and again.summary == first.summary
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"band": "drop"}, "band 'keep' became 'drop'"),
        ({"seed": 5}, "seed 0 became 5"),
        ({"dropped_sample": 3}, "dropped-sample 1000 became 3"),
        ({"text_field": "body"}, "text-field 'text' became 'body'"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, source: Path, texts: list[str], changed: dict[str, Any], said: str
) -> None:
    make_heads(tmp_path / "heads", texts)
    run(source, tmp_path / "heads", tmp_path / "out")
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "heads", tmp_path / "out", **changed)
    assert caught.value.code == "E-HYDRA-RESUME" and said in str(caught.value)


def test_other_heads_and_other_sources_are_refused(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts)
    run(source, tmp_path / "heads", tmp_path / "out")
    make_heads(tmp_path / "others", texts, seed=1)
    with pytest.raises(DataError, match=r"E-HYDRA-RESUME.*the heads .* became"):
        run(source, tmp_path / "others", tmp_path / "out")
    (source / "e.txt").write_text("one more")
    with pytest.raises(DataError, match=r"E-HYDRA-RESUME.*source files changed"):
        run(source, tmp_path / "heads", tmp_path / "out")


def test_heads_without_calibration_are_refused(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts, calibrated=False)
    with pytest.raises(DataError, match="E-HYDRA-UNCALIBRATED"):
        run(source, tmp_path / "heads", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match=r"E-OUT-NOT-EMPTY.*letter\.txt"):
        run(source, tmp_path / "heads", tmp_path / "out")


def test_a_source_without_text_leaves_only_the_reasons(tmp_path: Path, texts: list[str]) -> None:
    make_heads(tmp_path / "heads", texts)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"{\n")
    with pytest.raises(DataError, match=r"E-NO-TEXT.*invalid-json"):
        run(tmp_path / "in", tmp_path / "heads", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rejected.jsonl"]
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"text": "better"}\n')
    assert (
        run(tmp_path / "in", tmp_path / "heads", tmp_path / "out").summary["counts"]["documents"]
        == 1
    )


def test_progress_ends_at_the_whole_and_never_goes_back(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    make_heads(tmp_path / "heads", texts)
    shown: list[FilterProgress] = []
    result = filter_corpus(
        str(source), tmp_path / "heads", tmp_path / "out", FilterSettings(), progress=shown.append
    )
    done = [now.bytes_done for now in shown]
    assert done == sorted(done) and done[-1] == shown[-1].bytes_total
    assert shown[-1].documents == 300 and shown[-1].rejected == 3
    assert shown[-1].kept == result.summary["counts"]["kept"]
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert timing["documents"] == 300 and timing["documents_per_s"] > 0


@pytest.mark.parametrize(
    "named",
    [{"workers": 0}, {"band": "maybe"}, {"dropped_sample": -1}, {"ray": "x", "devices": ("cpu",)}],
)
def test_settings_that_do_not_work_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT"):
        FilterSettings(**named)
