"""Documents: identity, split, strata, and a sample that is fair, seeded and bounded."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from nmoe_data.errors import DataError
from nmoe_data.hydra.documents import (
    Document,
    Reservoir,
    document_id,
    domain_of,
    domains_of,
    read_documents,
    sample_documents,
    split_of,
    stratum_of,
)
from scipy.stats import chisquare


def made(count: int, stratum: str = "a/0-511", prefix: str = "t") -> list[Document]:
    texts = [f"{prefix} {number}" for number in range(count)]
    return [Document(document_id(text), text, "s", n, stratum) for n, text in enumerate(texts)]


def sampled(documents: list[Document], size: int, seed: int) -> list[Document]:
    reservoir = Reservoir(size, seed)
    for document in documents:
        reservoir.add(document)
    return reservoir.documents()


def test_the_id_is_the_sha256_of_the_text_and_alike_for_equal_texts() -> None:
    text = "naïve 日本語 🙂\r\n"
    assert document_id(text) == hashlib.sha256(text.encode("utf-8")).hexdigest()


def test_the_split_takes_70_15_15_percent_and_does_not_follow_the_id_or_the_sample() -> None:
    ids = [document_id(str(n)) for n in range(20_000)]
    shares = Counter(map(split_of, ids))
    assert shares["train"] / 20_000 == pytest.approx(0.70, abs=0.015)
    assert shares["validation"] / 20_000 == pytest.approx(0.15, abs=0.012)
    assert shares["test"] / 20_000 == pytest.approx(0.15, abs=0.012)
    low = Counter(split_of(id) for id in ids if int(id[:2], 16) < 32)
    assert low["test"] / low.total() == pytest.approx(0.15, abs=0.03)
    chosen = Counter(split_of(document.id) for document in sampled(made(20_000), 3000, 0))
    assert chosen["test"] / 3000 == pytest.approx(0.15, abs=0.025)
    assert split_of("ab") == split_of("ab")


@pytest.mark.parametrize(
    ("length", "bucket"),
    [
        (1, "0-511"),
        (511, "0-511"),
        (512, "512-2047"),
        (8191, "2048-8191"),
        (8192, "8192-32767"),
        (32768, "32768-"),
        (10**6, "32768-"),
    ],
)
def test_a_stratum_is_domain_and_range_of_characters(length: int, bucket: str) -> None:
    stratum = stratum_of("a/b", "é" * length)
    assert stratum == f"a/b/{bucket}"
    assert domain_of(stratum) == "a/b"


def test_a_domain_is_the_last_name_of_a_source_unless_two_share_it() -> None:
    assert domains_of(["x/web.jsonl.zst", "y/code", "python-stdlib"]) == {
        "x/web.jsonl.zst": "web",
        "y/code": "code",
        "python-stdlib": "python-stdlib",
    }
    assert domains_of(["x/data", "y/data"]) == {"x/data": "x/data", "y/data": "y/data"}


def test_the_sample_does_not_depend_on_the_order_of_the_documents() -> None:
    documents = made(500) + made(40, "b/0-511", "u") + made(3, "c/0-511", "v")
    random.Random(1).shuffle(documents)
    first = sampled(documents, 100, seed=7)
    for shuffle in range(5):
        random.Random(shuffle).shuffle(documents)
        assert sampled(documents, 100, seed=7) == first
    assert sampled(documents, 100, seed=8) != first


def test_no_stratum_is_missing_and_the_large_ones_get_their_share() -> None:
    documents = made(9000) + made(900, "b/0-511", "u") + made(2, "c/0-511", "v")
    counts = Counter(document.stratum for document in sampled(documents, 400, seed=0))
    assert counts.total() == 400
    assert counts["c/0-511"] == 2
    assert counts["b/0-511"] == pytest.approx(40, abs=20)
    assert counts["a/0-511"] == pytest.approx(358, abs=20)


def test_every_document_of_a_stratum_has_the_same_chance() -> None:
    documents = made(60) + made(20, "b/0-511", "u")
    chosen: Counter[str] = Counter()
    for seed in range(600):
        chosen.update(document.id for document in sampled(documents, 20, seed))
    for stratum in ("a/0-511", "b/0-511"):
        counts = [chosen[document.id] for document in documents if document.stratum == stratum]
        assert chisquare(counts).pvalue > 1e-3


def test_any_first_part_of_the_sample_is_a_sample() -> None:
    documents = made(3000)
    assert sampled(documents, 200, seed=3)[:50] == sampled(documents, 50, seed=3)


def test_only_the_sample_and_a_quarter_more_is_ever_held() -> None:
    reservoir = Reservoir(100, 0)
    for number in range(5000):
        text = f"{number}"
        reservoir.add(Document(document_id(text), text, "s", 0, f"d{number % 10}/0-511"))
        held = sum(len(one._documents) for one in [reservoir._all, *reservoir._strata.values()])
        assert held <= 125
    assert len(reservoir.documents()) == 100


def test_equal_texts_count_once_even_in_two_strata() -> None:
    twice = made(30) + made(30)
    assert len(sampled(twice, 100, 0)) == 30
    elsewhere = [Document(d.id, d.text, d.source, d.offset, "b/0-511") for d in made(30)]
    assert len(sampled(made(30) + elsewhere, 100, 0)) == 30


def test_a_sample_of_sources_knows_what_it_read(tmp_path: Path, make_texts, write_jsonl) -> None:
    write_jsonl(tmp_path / "web" / "a.jsonl", make_texts(80))
    write_jsonl(tmp_path / "code" / "b.jsonl", make_texts(20, seed=1))
    (tmp_path / "code" / "b.jsonl").open("a").write("not json\n")
    out = tmp_path / "web" / "labels"
    write_jsonl(out / "own.jsonl", make_texts(5, seed=2))
    sources = [str(tmp_path / "web"), str(tmp_path / "code")]
    sample = sample_documents(sources, 50, 0, exclude=[out])
    assert len(sample.documents) == len({d.id for d in sample.documents}) == 50
    assert sum(sample.seen.values()) == 100
    assert {domain_of(stratum) for stratum in sample.seen} == {"web", "code"}
    assert sample.rejected == {"invalid-json": 1}
    assert sum(sample.sampled.values()) == 50
    found = {d.id: d for d in read_documents(sources, exclude=[out])}
    for document in sample.documents:
        assert found[document.id] == document
        line = Path(document.source).read_bytes()[document.offset :].split(b"\n")[0]
        assert json.loads(line)["text"] == document.text


def test_sources_without_a_document_and_a_sample_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"E-NO-TEXT: .*empty 1"):
        sample_documents(str(tmp_path), 10, 0)
    with pytest.raises(DataError, match="E-ARGUMENT"):
        sample_documents(str(tmp_path), 0, 0)
