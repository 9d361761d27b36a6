"""Preparation: every document ends up once, on its side, and can be traced; the rest is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers
from nmoe_data.errors import DataError
from nmoe_data.loader import open_dataset
from nmoe_data.prep import PrepProgress, prep
from nmoe_data.shards import find_problems
from nmoe_data.sources import document_id, list_files, sample_texts
from nmoe_data.tokenizer import load_tokenizer, train_bpe
from tokenizers import models


def documents_of(folder: Path) -> list[str]:
    """Decode every document of a dataset folder, in order, from the files alone."""
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    tokenizer = load_tokenizer(folder.parent / "tokenizer.json")
    texts = []
    for shard in manifest["shards"]:
        tokens = np.load(folder / shard["name"])
        for row in np.load(folder / shard["name"].replace(".npy", ".idx.npy")):
            ids = tokens[int(row["start"]) : int(row["start"] + row["length"])]
            assert ids[-1] == tokenizer.end_of_document_id
            texts.append(tokenizer.decode(ids[:-1].tolist()))
            assert document_id(texts[-1]) == row["id"]
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_comes_back_once_in_order_on_one_side(
    tokenizer: str, tmp_path: Path, make_texts, write_jsonl
) -> None:
    texts = make_texts(700)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    result = prep(source, tmp_path / "out", tokenizer=tokenizer, held_out=0.2, shard_tokens=5000)
    train, held_out = documents_of(result.train), documents_of(result.held_out)
    assert train == [text for text in texts if text in set(train)]
    assert held_out == [text for text in texts if text in set(held_out)]
    assert sorted(train + held_out) == sorted(texts)
    # 700 draws at 0.2: 140 expected, standard deviation 10.6.
    assert 90 < len(held_out) < 190
    assert find_problems(result.train) == find_problems(result.held_out) == []
    assert (result.documents, result.rejected, result.reused) == (700, {}, False)
    assert not (tmp_path / "out" / "state.json").exists()


def test_equal_texts_land_on_the_same_side_wherever_they_stand(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    texts = make_texts(100)
    one = write_jsonl(tmp_path / "a.jsonl", texts + texts[::-1])
    other = write_jsonl(tmp_path / "b.jsonl", texts[::-1])
    first = prep(one, tmp_path / "one", tokenizer="bytes", held_out=0.3)
    second = prep(other, tmp_path / "two", tokenizer="bpe:300", held_out=0.3)
    held_out = set(documents_of(first.held_out))
    assert held_out.isdisjoint(documents_of(first.train))
    assert held_out == set(documents_of(second.held_out))


def test_each_token_leads_back_to_the_line_it_came_from(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", make_texts(30, seed=ord(name)))
    train = prep(tmp_path / "in", tmp_path / "out", tokenizer="bytes", shard_tokens=2000).train
    manifest = open_dataset(train).manifest
    texts = iter(documents_of(train))
    for shard in manifest.shards:
        for row in np.load(train / shard.name.replace(".npy", ".idx.npy")):
            source = manifest.sources[int(row["source"])]
            data = (tmp_path / "in" / source["name"]).read_bytes()
            line = data[int(row["offset"]) :].split(b"\n")[0]
            assert json.loads(line)["text"] == next(texts)


def test_a_document_longer_than_a_shard_has_its_own_shard(tmp_path: Path, write_jsonl) -> None:
    texts = ["short", "x" * 1000, "y" * 10, "z" * 5000]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    train = prep(source, tmp_path / "out", tokenizer="bytes", shard_tokens=64).train
    assert [shard.tokens for shard in open_dataset(train).manifest.shards] == [6, 1001, 11, 5001]
    assert documents_of(train) == texts


def test_a_literal_end_of_document_in_a_text_does_not_end_it(tmp_path: Path, write_jsonl) -> None:
    texts = ["before<|endoftext|>after", "plain"] * 10
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    train = prep(source, tmp_path / "out", tokenizer=train_bpe(texts, 300)).train
    assert documents_of(train) == texts
    dataset = open_dataset(train)
    ends = dataset.read(0, dataset.tokens) == dataset.end_of_document_id
    assert int(ends.sum()) == 20


def test_a_tokenizer_that_spells_its_own_end_loses_only_that_document(
    tmp_path: Path, write_jsonl, rejected
) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"?": 0, "</s>": 1, "a": 2}, unk_token="?"))
    inner.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "</s>", "a"])
    result = prep(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    assert result.documents == 2
    assert [reason for _, _, reason in rejected(tmp_path / "out")] == ["end-id-in-text"]


def test_each_refused_record_is_written_down_and_counted(tmp_path: Path, rejected) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": null}\n[]\n')
    (source / "b.txt").write_bytes(b"\0")
    (source / "c.bin").write_bytes(b"\1")
    (source / "d.txt").write_bytes(b"fine")
    result = prep(source, tmp_path / "out", tokenizer="bytes")
    assert rejected(tmp_path / "out") == [
        ("a.jsonl", 15, "null-text"),
        ("a.jsonl", 30, "not-an-object"),
        ("b.txt", 0, "nul-byte"),
        ("c.bin", 0, "unsupported-extension"),
    ]
    counts = open_dataset(result.train).manifest.counts
    assert (counts["records_in"], counts["documents_out"]) == (6, 2)
    assert counts["rejected"] == result.rejected
    assert sum(result.rejected.values()) == 4


def test_the_manifest_says_where_everything_came_from(tmp_path: Path, run_cli) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc")
    run_cli(
        "prep",
        tmp_path / "in",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--held-out",
        "0",
    )
    manifest = open_dataset(tmp_path / "out" / "train").manifest
    assert manifest.command.startswith("nmoe-data prep ")
    assert manifest.tokenizer == {
        "name": "bytes",
        "hash": load_tokenizer("bytes").hash,
        "vocab_size": 257,
        "end_of_document_id": 256,
    }
    (source,) = manifest.sources
    assert (source["root"], source["name"], source["size"]) == (str(tmp_path / "in"), "a.txt", 3)
    # sha256 of "abc", FIPS 180-2 appendix B.1
    assert source["sha256"].startswith("ba7816bf8f01cfea")
    assert (manifest.shards[0].min_id, manifest.shards[0].max_id) == (97, 256)


def test_the_limit_stops_after_the_document_that_reaches_it(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    texts = make_texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    sizes = np.cumsum([len(text.encode()) for text in texts])
    for limit in (1, int(sizes[9]), int(sizes[9]) + 1, 10**9):
        result = prep(source, tmp_path / str(limit), tokenizer="bytes", limit_bytes=limit)
        assert result.documents == min(int((sizes < limit).sum()) + 1, 300)


def test_another_text_field_is_used_when_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "b", "text": "t"}\n')
    train = prep(tmp_path / "a.jsonl", tmp_path / "o", tokenizer="bytes", text_field="body").train
    assert documents_of(train) == ["b"]


def test_several_sources_keep_their_order(tmp_path: Path) -> None:
    for name in ("z", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text(name)
    sources = [tmp_path / "z", tmp_path / "a"]
    assert documents_of(prep(sources, tmp_path / "o", tokenizer="bytes").train) == ["z", "a"]


def test_a_bpe_named_by_size_is_the_one_trained_on_the_sample(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    result = prep(source, tmp_path / "o", tokenizer="bpe:320")
    expected = train_bpe(sample_texts(list_files(source), 4 << 20), 320)
    assert load_tokenizer(result.tokenizer).hash == expected.hash


def test_progress_reaches_the_end(tmp_path: Path, make_texts, write_jsonl) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(500))
    seen: list[PrepProgress] = []
    result = prep(source, tmp_path / "o", tokenizer="bytes", progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == source.stat().st_size
    assert (seen[-1].documents, seen[-1].tokens) == (500, result.train_tokens)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert len(seen) > 2


def stop(progress: PrepProgress) -> None:
    raise KeyboardInterrupt


ARGUMENTS = {"tokenizer": "bytes", "held_out": 0.1, "shard_tokens": 3000}
OTHERS = [
    {"tokenizer": "bpe:300"},
    {"held_out": 0.2},
    {"shard_tokens": 3001},
    {"limit_bytes": 10**6},
    {"text_field": "body"},
]


@pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "finished"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_other_arguments_in_the_same_folder_are_refused_by_name(
    other: dict, finished: bool, tmp_path: Path, make_texts, write_jsonl, tree
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))

    if finished:
        prep(source, tmp_path / "o", **ARGUMENTS)
    else:
        with pytest.raises(KeyboardInterrupt):
            prep(source, tmp_path / "o", progress=stop, **ARGUMENTS)
    before = tree(tmp_path / "o")
    name = next(iter(other)).replace("_", "-")
    with pytest.raises(DataError, match=f"E-OUT-DIFFERS.*{name}"):
        prep(source, tmp_path / "o", **{**ARGUMENTS, **other})
    assert tree(tmp_path / "o") == before


def test_a_finished_folder_is_returned_untouched(
    tmp_path: Path, make_texts, write_jsonl, tree
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    first = prep(source, tmp_path / "o", **ARGUMENTS)
    before = tree(tmp_path / "o")
    second = prep(source, tmp_path / "o", **ARGUMENTS)
    assert second.reused
    assert (second.train_tokens, second.documents) == (first.train_tokens, first.documents)
    assert tree(tmp_path / "o") == before
    for name in ("shard-00000.npy", "shard-00000.idx.npy"):
        (tmp_path / "o" / "train" / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"E-SHARD-LAYOUT.*{name}"):
            prep(source, tmp_path / "o", **ARGUMENTS)
        (tmp_path / "o" / "train" / name).write_bytes(before[f"train/{name}"])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_source_folder_that_holds_the_output_is_read_without_it(
    tokenizer: str, tmp_path: Path, make_texts, write_jsonl, tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = {"tokenizer": tokenizer, "exclude": [Path("run")]}
    with pytest.raises(KeyboardInterrupt):
        prep(".", Path("out"), progress=stop, **arguments)
    (tmp_path / "run" / "log.txt").write_text("written by the caller meanwhile")
    first = prep(".", Path("out"), **arguments)
    assert first.documents == 300
    before = tree(tmp_path / "out")
    again = prep(".", Path("out"), **arguments)
    assert (again.reused, tree(tmp_path / "out")) == (True, before)
    assert [s["name"] for s in open_dataset(first.train).manifest.sources] == ["a.jsonl"]


@pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "finished"])
def test_a_source_typed_in_another_way_is_the_same_source(
    finished: bool, tmp_path: Path, make_texts, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(300))
    write_jsonl(tmp_path / "in" / "b.jsonl", make_texts(10, seed=1))
    shutil.copytree(tmp_path / "in", tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    arguments = {"tokenizer": "bpe:300", "held_out": 0.1}
    if finished:
        prep("./in", Path("out"), **arguments)
    else:
        with pytest.raises(KeyboardInterrupt):
            prep("./in", Path("out"), progress=stop, **arguments)
        # As after a kill before the tokenizer was saved: it is trained once more.
        Path("out", "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"E-OUT-DIFFERS.*'\./in'.*'other'"):
        prep("other", Path("out"), **arguments)
    for spelling in ("in", "in/", "other/../in", tmp_path / "in"):
        result = prep(spelling, Path("out"), **arguments)
        assert result.documents == 310
    manifest = open_dataset(result.train).manifest
    assert manifest.arguments["sources"] == ["./in"]
    assert [source["root"] for source in manifest.sources] == ["./in", "./in"]


def test_a_folder_named_like_the_word_for_the_library_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python-stdlib").mkdir()
    (tmp_path / "python-stdlib" / "a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    prep("./python-stdlib", Path("out"), tokenizer="bytes")
    with pytest.raises(DataError, match=r"E-OUT-DIFFERS.*'python-stdlib'"):
        prep("python-stdlib", Path("out"), tokenizer="bytes", limit_bytes=1)


def test_the_sources_are_listed_once(
    tmp_path: Path, make_texts, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(100))
    walked, walk = [], Path.rglob

    def counted(folder: Path, pattern: str):
        walked.append(folder)
        return walk(folder, pattern)

    monkeypatch.setattr(Path, "rglob", counted)
    prep(tmp_path / "in", tmp_path / "out", tokenizer="bpe:300")
    assert walked == [tmp_path / "in"]


def test_a_source_that_changed_since_the_run_was_begun_is_refused(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))

    with pytest.raises(KeyboardInterrupt):
        prep(source, tmp_path / "o", progress=stop, **ARGUMENTS)
    original = source.read_bytes()
    source.write_bytes(original.replace(b"0: ", b"1: ", 1))
    with pytest.raises(DataError, match="E-SOURCE-CHANGED"):
        prep(source, tmp_path / "o", **ARGUMENTS)
    source.write_bytes(original + b"\n")
    with pytest.raises(DataError, match=r"E-SOURCE-CHANGED.*source files"):
        prep(source, tmp_path / "o", **ARGUMENTS)
    source.write_bytes(original)
    assert prep(source, tmp_path / "o", **ARGUMENTS).documents == 300


@pytest.mark.parametrize(
    "arguments",
    [
        {"held_out": 1.0},
        {"held_out": -0.1},
        {"held_out": float("nan")},
        {"shard_tokens": 0},
        {"limit_bytes": 0},
        {"tokenizer": "bpe:many"},
    ],
    ids=str,
)
def test_an_impossible_argument_is_refused(arguments: dict, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match="E-ARGUMENT"):
        prep(tmp_path / "a.txt", tmp_path / "o", **{"tokenizer": "bytes", **arguments})


def test_a_source_without_usable_text_says_so_and_leaves_the_reasons(
    tmp_path: Path, rejected
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"E-NO-TEXT.*nul-byte"):
        prep(tmp_path / "in", tmp_path / "o", tokenizer="bytes", held_out=0.1)
    assert rejected(tmp_path / "o") == [("a.txt", 0, "nul-byte")]
    (tmp_path / "in" / "b.txt").write_text("good")
    assert prep(tmp_path / "in", tmp_path / "o", tokenizer="bytes").documents == 1


def test_a_text_of_one_character_is_a_dataset_of_two_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    result = prep(tmp_path / "a.txt", tmp_path / "o", tokenizer="bytes", held_out=0.000001)
    assert (result.train_tokens, result.held_out_tokens) == (2, 0)
    assert open_dataset(result.held_out).tokens == 0


def test_a_folder_of_something_else_is_not_written_into(tmp_path: Path, tree) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"E-OUT-NOT-EMPTY.*thesis\.tex"):
        prep(tmp_path / "a.txt", tmp_path / "home", tokenizer="bytes")
    assert tree(tmp_path / "home") == {"thesis.tex": b"mine"}


def test_two_runs_cannot_write_one_folder_at_once(tmp_path: Path, make_texts, write_jsonl) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(10))

    def again(progress: PrepProgress) -> None:
        prep(source, tmp_path / "o", **ARGUMENTS)

    with pytest.raises(DataError, match="E-OUT-BUSY"):
        prep(source, tmp_path / "o", progress=again, **ARGUMENTS)
    assert prep(source, tmp_path / "o", **ARGUMENTS).documents == 10


@pytest.mark.parametrize("number", range(8))
def test_a_single_document_trains_whatever_its_hash(tmp_path: Path, number: int) -> None:
    source = tmp_path / "book.txt"
    source.write_text(f"the only document, number {number}\n" * 50)
    result = prep(source, tmp_path / "out", tokenizer="bytes", held_out=0.9)
    assert result.train_tokens > 0 and result.held_out_tokens == 0


def test_copies_of_the_first_document_train_with_it(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for name in "abcd":
        (source / f"{name}.txt").write_text("the same text in every file\n")
    result = prep(source, tmp_path / "out", tokenizer="bytes", held_out=0.9999)
    assert result.documents == 4 and result.held_out_tokens == 0


def test_a_device_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="E-SOURCE-KIND: /dev/zero"):
        prep("/dev/zero", tmp_path / "out", tokenizer="bytes")
