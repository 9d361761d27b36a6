"""Data: shards that nmoe-data really wrote, their sources, lengths and documents, and the page."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headless import EVIL, Open, figures, markup, open_page, texts, tiles
from nmoe_data.inspect import find_document
from nmoe_data.prep import prep
from nviz.errors import VizError
from nviz.queries import data
from nviz.store.decoding import open_decoder
from nviz.store.manifests import Dataset, find_datasets, read_dataset
from nviz.store.runs import RunIndex
from real_text import stdlib_pieces
from run_folder import RunFolder

__all__ = ["open_page"]

# Text that is markup, not ASCII, or an end token's name.
ODD = [EVIL, "Grüße, 世界 🚀\n\ttabs", "<|endoftext|> is only text here", "x"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes and a trained BPE over two sources, several shards, a twentieth held out."""
    folder = tmp_path_factory.mktemp("prepared")
    pieces = stdlib_pieces()
    for name, found in (("web.jsonl", [*ODD, *pieces[:60]]), ("code.jsonl", pieces[60:90])):
        lines = [json.dumps({"text": text}) + "\n" for text in found]
        (folder / name).write_text("".join([*lines, '{"text": null}\n']))
    sources = [folder / "web.jsonl", folder / "code.jsonl"]
    prep(sources, folder / "bytes", tokenizer="bytes", held_out=0.1, shard_tokens=40_000)
    prep(sources, folder / "bpe", tokenizer="bpe:400", held_out=0.1, shard_tokens=20_000)
    return folder


@pytest.fixture
def served(root: Path, prepared: Path) -> Path:
    """A root with a run that trained on the BPE, and the bytes beside it."""
    run = RunFolder(root, "a")
    shutil.copytree(prepared / "bpe", run.path / "data")
    shutil.copytree(prepared / "bytes", root / "corpus" / "bytes")
    return root


def dataset(folder: Path) -> Dataset:
    """A data set that can be shown."""
    found = read_dataset(folder.name, folder)
    assert found.problem is None
    return found


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_document_is_the_one_that_nmoe_data_finds(prepared: Path, kind: str) -> None:
    item = dataset(prepared / kind / "train")
    decode = open_decoder(prepared, item)
    assert item.documents and len(item.shards) > 1
    seen = []
    for number in range(item.documents):
        found = data.find_document(item, number, decode)
        expected = find_document(prepared / kind / "train", number)
        assert found.text == expected.text
        assert (found.shard, found.start, found.start + found.tokens + 1) == (
            expected.shard,
            expected.start,
            expected.end,
        )
        assert (found.source, found.offset, found.id) == (
            expected.source,
            expected.offset,
            expected.id,
        )
        seen.append(found.text)
    assert any("世界" in text for text in seen)


def test_a_long_document_is_cut_and_its_length_told(tmp_path: Path) -> None:
    text = "".join(stdlib_pieces()[:20])
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    prep(tmp_path / "one.jsonl", tmp_path / "out", tokenizer="bytes")
    item = dataset(tmp_path / "out" / "train")
    found = data.find_document(item, 0, open_decoder(tmp_path, item))
    assert found.tokens == len(text.encode()) > data.MOST_TOKENS
    assert found.text == text.encode()[: data.MOST_TOKENS].decode(errors="replace")
    assert len(found.ids) == data.MOST_IDS


def indices(folder: Path) -> np.ndarray[Any, Any]:
    return np.concatenate([np.load(path) for path in sorted(folder.glob("*.idx.npy"))])


def test_shares_and_lengths_are_those_of_the_indices(prepared: Path) -> None:
    item = dataset(prepared / "bytes" / "train")
    found = data.statistics(item)
    rows = indices(item.folder)
    assert (found.stride, found.problems) == (1, [])
    assert sum(share.tokens for share in found.shares) == item.tokens == rows["length"].sum()
    assert sum(share.documents for share in found.shares) == item.documents
    for at, source in enumerate(item.sources):
        own = rows[rows["source"] == at]
        (share,) = [share for share in found.shares if share.group == source.name]
        assert (share.documents, share.tokens) == (len(own), own["length"].sum())
        assert share.bytes == (prepared / source.name).stat().st_size
    assert found.count_B.sum() == item.documents
    assert found.median_tokens == np.median(rows["length"])
    for low, high, count in zip(
        found.edge_B1[:-1], found.edge_B1[1:-1], found.count_B, strict=False
    ):
        assert count == ((rows["length"] >= low) & (rows["length"] < high)).sum()


def test_of_a_large_data_set_every_kth_document_stands_for_k(prepared: Path) -> None:
    item = dataset(prepared / "bytes" / "train")
    found = data.statistics(item, most_rows=20)
    assert found.stride == -(-item.documents // 20)  # type: ignore[operator]  # it is known
    kept = np.concatenate(
        [np.load(p)[:: found.stride] for p in sorted(item.folder.glob("*.idx.npy"))]
    )
    tokens = sum(share.tokens for share in found.shares)
    assert tokens == found.stride * kept["length"].sum()
    assert found.count_B.sum() == found.stride * len(kept)


def test_many_sources_end_in_one_group(tmp_path: Path) -> None:
    for at, text in enumerate(stdlib_pieces()[:30]):
        folder = tmp_path / "in" / f"part-{at:02d}"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(text[: 200 + 20 * at])
    prep(tmp_path / "in", tmp_path / "out", tokenizer="bytes")
    item = dataset(tmp_path / "out" / "train")
    found = data.statistics(item).shares
    assert len(found) == data.MOST_GROUPS + 1
    assert (found[0].group, found[-1].group) == ("part-29", f"{30 - data.MOST_GROUPS} others")
    assert sum(share.tokens for share in found) == item.tokens


def test_datasets_are_found_in_runs_where_they_say_and_below_the_root(served: Path) -> None:
    shutil.copytree(served / "corpus" / "bytes", served / "x" / "y" / "z" / "too" / "deep")
    named = RunFolder(served, "b", data={"dir": str(served / "corpus" / "bytes"), "tokens": 1})
    runs = RunIndex(served).refresh()
    assert list(find_datasets(served, runs.values())) == [
        "corpus/bytes/train",
        "corpus/bytes/held-out",
        "a/data/train",
        "a/data/held-out",
    ]
    named.save(data={"dir": "x/y/z/too/deep"})
    deep = find_datasets(served, RunIndex(served).refresh().values())
    assert "x/y/z/too/deep/train" in deep


@pytest.mark.parametrize(
    "where", ["{outside}", "../outside", "/", "link", "x\0y", "a/../../outside", "x" * 300]
)
def test_nothing_outside_of_the_root_is_opened(root: Path, prepared: Path, where: str) -> None:
    outside = root.parent / "outside"
    shutil.copytree(prepared / "bytes", outside)
    (root / "link").symlink_to(outside)
    RunFolder(root, "a", data={"dir": where.format(outside=outside)})
    assert find_datasets(root, RunIndex(root).refresh().values()) == {}


def test_a_shard_that_is_no_shard_is_refused(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d" / "train"
    shutil.copytree(prepared / "bytes", tmp_path / "d")
    item = dataset(folder)
    decode = open_decoder(tmp_path, item)
    first = folder / item.shards[0].name
    tokens = first.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(VizError, match=words) as caught:
            data.find_document(item, 0, decode)
        assert caught.value.code == "E-SHARD"

    first.write_bytes(tokens[:50])
    refused("cannot be read")
    np.save(first, np.zeros(3, dtype=np.float64))
    refused("holds no token ids")
    np.save(first, np.zeros(3, dtype=np.uint16))
    refused("points out of it")
    np.save(first, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refused("cannot be read")
    first.unlink()
    refused("is not there")
    first.symlink_to("/etc/passwd")
    refused("which is no shard")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["name"] = "../../../etc/passwd"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    item = dataset(folder)
    refused("which is no shard")
    assert len(data.statistics(item).problems) == 1


@pytest.mark.parametrize("number", [-1, 10**9])
def test_a_document_that_is_not_there_is_refused(prepared: Path, number: int) -> None:
    item = dataset(prepared / "bytes" / "train")
    with pytest.raises(VizError, match="E-DOCUMENT-NUMBER"):
        data.find_document(item, number, open_decoder(prepared, item))


def test_another_tokenizer_is_refused(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "bpe", tmp_path / "d")
    item = dataset(tmp_path / "d" / "train")
    path = tmp_path / "d" / "tokenizer.json"

    def refused(code: str) -> None:
        with pytest.raises(VizError) as caught:
            open_decoder(tmp_path, item)
        assert caught.value.code == code

    shutil.copy(prepared / "bytes" / "tokenizer.json", path)
    refused("E-TOKENIZER-DRIFT")
    content = json.loads((prepared / "bpe" / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    path.write_text(json.dumps(content))
    refused("E-TOKENIZER-DRIFT")
    path.write_text('{"model": 3}')
    refused("E-TOKENIZER-INVALID")
    path.write_text("{")
    refused("E-TOKENIZER-INVALID")
    path.unlink()
    refused("E-TOKENIZER-MISSING")
    path.symlink_to(prepared / "bpe" / "tokenizer.json")
    refused("E-TOKENIZER-MISSING")


def test_a_tokenizer_above_the_root_is_not_opened(prepared: Path) -> None:
    item = dataset(prepared / "bytes" / "train")
    with pytest.raises(VizError, match="E-TOKENIZER-MISSING"):
        open_decoder(prepared / "bytes" / "train", item)


def test_without_the_package_bytes_decode_and_others_say_what_to_install(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared, tmp_path / "d")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    open_decoder(tmp_path, dataset(tmp_path / "d" / "bytes" / "train"))
    with pytest.raises(VizError, match="pip install tokenizers") as caught:
        open_decoder(tmp_path, dataset(tmp_path / "d" / "bpe" / "train"))
    assert caught.value.code == "E-TOKENIZER-PACKAGE"


def test_the_page_shows_the_runs_data_and_a_document(served: Path, open_page: Open) -> None:
    app = open_page("data", run="a", document="3")
    manifest = json.loads((served / "a" / "data" / "train" / "manifest.json").read_text())
    assert tiles(app)["Documents"] == str(manifest["documents"])
    assert tiles(app)["Records refused"] == "2" and tiles(app)["Shards"] == str(
        len(manifest["shards"])
    )
    expected = find_document(served / "a" / "data" / "train", 3)
    assert app.code[0].value.strip() == expected.text.strip()
    assert f"{expected.shard} from token {expected.start:,}" in texts(app)
    shares = figures(app)[0]["data"][0]
    assert sorted(shares["y"]) == ["code.jsonl", "web.jsonl"] and sum(shares["x"]) == pytest.approx(
        1
    )
    other = open_page("data", data="corpus/bytes/held-out")
    assert "corpus/bytes/held-out · held-out · tokenizer bytes" in texts(other)


def test_text_of_documents_stays_text(served: Path, open_page: Open) -> None:
    train = served / "corpus" / "bytes" / "train"
    item = dataset(train)
    number = next(n for n in range(item.documents or 0) if find_document(train, n).text == EVIL)
    app = open_page("data", data="corpus/bytes/train", document=str(number))
    assert app.code[0].value == EVIL
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))


@pytest.mark.parametrize("document", ["-3", "999999", "x"])
def test_a_document_that_the_address_makes_up_is_the_first(
    served: Path, open_page: Open, document: str
) -> None:
    app = open_page("data", run="a", document=document)
    expected = find_document(served / "a" / "data" / "train", 0)
    assert app.code[0].value.strip() == expected.text.strip()


def test_data_outside_of_the_root_are_named_and_not_opened(
    root: Path, open_page: Open, prepared: Path
) -> None:
    RunFolder(root, "a", data={"dir": str(prepared / "bytes")})
    app = open_page("data", run="a")
    assert "outside of the folder that is served" in texts(app)
    assert "No token shards here yet" in texts(app) and not app.code[1:]


@pytest.mark.parametrize("key", ["../../etc", "/etc", "a/data", "gone"])
def test_an_address_without_a_data_set_is_answered(served: Path, open_page: Open, key: str) -> None:
    app = open_page("data", data=key)
    assert "There is no data set" in texts(app) and not figures(app)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no whole JSON"),
        (b"[]", "holds no JSON object"),
        (b'{"schema_version": 9}', "has schema_version 9"),
        (b'{"schema_version": 1}', "holds no document"),
        (
            b'{"schema_version": 1, "shards": [3, {"name": 5, "documents": "many"}],'
            b'"documents": 2, "sources": {"a": 1}, "tokenizer": "x", "split": [],'
            b'"counts": {"rejected": 7}}',
            "E-TOKENIZER-MISSING",
        ),
    ],
)
def test_odd_manifests_break_nothing(
    root: Path, open_page: Open, content: bytes, words: str
) -> None:
    (root / "odd").mkdir()
    (root / "odd" / "manifest.json").write_bytes(content)
    assert words in texts(open_page("data"))


def test_hostile_names_in_a_manifest_stay_text(root: Path, open_page: Open, prepared: Path) -> None:
    shutil.copytree(prepared / "bytes", root / "d")
    path = root / "d" / "train" / "manifest.json"
    content = json.loads(path.read_text())
    for source in content["sources"]:
        source["root"] = source["name"] = EVIL
    content |= {"tool": EVIL, "command": EVIL, "split": EVIL}
    content["tokenizer"]["name"] = EVIL
    path.write_text(json.dumps(content))
    app = open_page("data")
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))
    assert "<script" not in json.dumps(figures(app))


def test_the_manifest_that_was_read_is_the_one_on_disk(root: Path, prepared: Path) -> None:
    shutil.copytree(prepared / "bytes", root / "d")
    path = root / "d" / "train" / "manifest.json"
    before = read_dataset("d/train", path.parent)
    content = json.loads(path.read_text()) | {"split": "changed"}
    path.write_text(json.dumps(content))
    os.utime(path, ns=(1, 1))
    assert (before.split, read_dataset("d/train", path.parent).split) == ("train", "changed")
    assert before.shards[0].sha256 == hashlib.sha256(
        (path.parent / before.shards[0].name).read_bytes()
    ).hexdigest()  # fmt: skip
