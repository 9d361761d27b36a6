"""Shards: ids are checked before they are narrowed, rows lead back to documents, damage is seen."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_data.errors import DataError
from nmoe_data.loader import open_dataset
from nmoe_data.prep import prep
from nmoe_data.shards import INDEX_DTYPE, ShardWriter, find_problems, token_dtype
from nmoe_data.shards.layout import shard_name


def writer(folder: Path, vocab_size: int = 300, shard_tokens: int = 10) -> ShardWriter:
    return ShardWriter(
        folder, vocab_size=vocab_size, end_of_document_id=0, shard_tokens=shard_tokens
    )


def write(target: ShardWriter, lengths: list[int]) -> list[list[int]]:
    documents = [[1 + (number + i) % 250 for i in range(n)] for number, n in enumerate(lengths)]
    for number, ids in enumerate(documents):
        target.append(ids, source=number % 3, offset=number * 7, document_id=number << 40)
    return documents


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "u2"), (65_536, "u2"), (65_537, "u4"), (200_000, "u4")]
)
def test_the_dtype_follows_from_the_vocabulary(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    target = writer(tmp_path, vocab_size)
    target.append([vocab_size - 1], source=0, offset=0, document_id=0)
    target.finish()
    array = np.load(tmp_path / shard_name(0))
    assert array.dtype == np.dtype(dtype)
    assert array.tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("bad", [-1, 65_536, 70_000, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_not_wrapped(bad: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="E-TOKEN-RANGE"):
        writer(tmp_path, 65_536).append([1, bad, 2], source=0, offset=0, document_id=0)


@given(lengths=st.lists(st.integers(0, 25), min_size=1, max_size=30), size=st.integers(1, 20))
@settings(deadline=None, max_examples=25)
def test_every_document_is_in_one_shard_and_its_row_finds_it(
    lengths: list[int], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    target = writer(folder, shard_tokens=size)
    documents = write(target, lengths)
    shards = target.finish()
    found = []
    for shard in shards:
        tokens = np.load(folder / shard.name)
        index = np.load(folder / shard.name.replace(".npy", ".idx.npy"))
        assert index.dtype == INDEX_DTYPE
        assert (len(tokens), len(index)) == (shard.tokens, shard.documents)
        assert shard.tokens <= size or shard.documents == 1
        assert (shard.min_id, shard.max_id) == (tokens.min(), tokens.max())
        for row in index:
            piece = tokens[int(row["start"]) : int(row["start"] + row["length"])]
            found.append((piece.tolist(), tuple(row)[2:]))
    expected = [([*ids, 0], (n % 3, n * 7, n << 40)) for n, ids in enumerate(documents)]
    assert found == expected
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        name for s in shards for name in (s.name, s.name.replace(".npy", ".idx.npy"))
    )


@given(data=st.data(), lengths=st.lists(st.integers(0, 25), min_size=2, max_size=20))
@settings(deadline=None, max_examples=25)
def test_a_resumed_writer_makes_the_same_bytes(
    data, lengths: list[int], tmp_path_factory: pytest.TempPathFactory, tree
) -> None:
    whole, resumed = (tmp_path_factory.mktemp(name) for name in ("whole", "resumed"))
    straight = writer(whole)
    documents = write(straight, lengths)
    shards = straight.finish()
    saved_at = data.draw(st.integers(0, len(lengths)))
    first = writer(resumed)
    write(first, lengths[:saved_at])
    state = first.checkpoint()
    # What a run did after its last recorded checkpoint, on disk or not, sealed or not.
    write(first, data.draw(st.lists(st.integers(0, 25), max_size=8)))
    data.draw(st.sampled_from([lambda: None, first.checkpoint, first.finish]))()
    first.close()
    second = ShardWriter(
        resumed, vocab_size=300, end_of_document_id=0, shard_tokens=10, state=state
    )
    for number in range(saved_at, len(lengths)):
        second.append(
            documents[number], source=number % 3, offset=number * 7, document_id=number << 40
        )
    assert second.finish() == shards
    assert tree(resumed) == tree(whole)


def test_a_writer_refuses_files_shorter_than_its_state(tmp_path: Path) -> None:
    target = writer(tmp_path, shard_tokens=100)
    write(target, [5, 5])
    state = target.checkpoint()
    target.close()
    partial = tmp_path / (shard_name(0) + ".partial")
    partial.write_bytes(partial.read_bytes()[:-2])
    again = ShardWriter(
        tmp_path, vocab_size=300, end_of_document_id=0, shard_tokens=100, state=state
    )
    with pytest.raises(DataError, match="E-RESUME-STATE"):
        again.finish()


@pytest.fixture
def folder(tmp_path: Path, make_texts, write_jsonl) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    return prep(source, tmp_path / "out", tokenizer="bytes", shard_tokens=3000).train


def test_a_whole_dataset_has_no_problems(folder: Path) -> None:
    assert find_problems(folder) == []
    assert open_dataset(folder, verify=True).documents == 50


def _edit_array(path: Path, change) -> None:
    array = np.load(path)
    change(array)
    np.save(path, array)


def _edit_manifest(folder: Path, change) -> None:
    path = folder / "manifest.json"
    content = orjson.loads(path.read_bytes())
    change(content)
    path.write_bytes(orjson.dumps(content))


def _wider(array: np.ndarray) -> np.ndarray:
    """The same rows in a dtype of another size."""
    if array.dtype.names is None:
        return array.astype(np.uint32)
    return array.astype([(name, "<u8") for name in array.dtype.names])


SHARD, INDEX = "shard-00001.npy", "shard-00001.idx.npy"


@pytest.mark.parametrize("place", [0, 100, -1], ids=["header", "body", "last"])
@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_one_flipped_bit_is_found_and_the_shard_named(name: str, place: int, folder: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 1
    (folder / name).write_bytes(data)
    problems = find_problems(folder)
    assert problems
    assert all(name in problem for problem in problems if "CHECKSUM" in problem)
    with pytest.raises(DataError, match=f"E-SHARD.*{name}"):
        open_dataset(folder, verify=True)


@pytest.mark.parametrize("name", [SHARD, INDEX])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, _wider(np.load(path))),
        lambda path: np.save(path, np.load(path)[:-1]),
        lambda path: np.save(path, np.load(path)[None]),
    ],
    ids=["missing", "cut", "empty", "wide", "short", "matrix"],
)
def test_a_file_of_the_wrong_shape_is_refused_when_opened(damage, name: str, folder: Path) -> None:
    damage(folder / name)
    with pytest.raises(DataError, match=f"E-SHARD-.*{name}"):
        open_dataset(folder)
    assert any(name in problem for problem in find_problems(folder))


def test_an_id_past_the_vocabulary_is_named_when_read(folder: Path) -> None:
    _edit_array(folder / SHARD, lambda tokens: tokens.__setitem__(3, 9999))
    dataset = open_dataset(folder)
    with pytest.raises(DataError, match=f"E-SHARD-RANGE.*{SHARD}"):
        dataset.read(0, dataset.tokens)
    assert any("E-SHARD-RANGE" in problem for problem in find_problems(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["start"].__setitem__(1, 0),
        lambda index: index["length"].__setitem__(-1, 1),
        lambda index: index["source"].__setitem__(0, 99),
    ],
    ids=["start", "length", "source"],
)
def test_an_index_that_disagrees_is_found(change, folder: Path) -> None:
    _edit_array(folder / INDEX, change)
    assert any("E-SHARD-INDEX" in problem for problem in find_problems(folder))


def test_an_end_token_inside_a_document_is_found(folder: Path) -> None:
    _edit_array(folder / SHARD, lambda tokens: tokens.__setitem__(1, 256))
    assert any("end-of-document" in problem for problem in find_problems(folder))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: m.update(schema_version=99), "E-SCHEMA-VERSION"),
        (lambda m: m.pop("tokenizer"), "E-MANIFEST-INVALID"),
        (lambda m: m["shards"][0].pop("tokens"), "E-MANIFEST-INVALID"),
        (lambda m: m["shards"][0].update(max_id=70_000), "E-SHARD-RANGE"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(change, code: str, folder: Path) -> None:
    _edit_manifest(folder, change)
    with pytest.raises(DataError, match=code):
        open_dataset(folder)


def test_a_manifest_whose_totals_do_not_add_up_is_found(folder: Path) -> None:
    _edit_manifest(folder, lambda m: m.update(tokens=1))
    assert any("E-MANIFEST-COUNTS" in problem for problem in find_problems(folder))


def test_a_folder_without_or_with_a_broken_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="E-MANIFEST-INVALID"):
        open_dataset(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="E-DATASET-MISSING"):
        open_dataset(folder)
