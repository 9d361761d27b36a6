"""The data of a run: made where it is missing, recognised by its tokens, refused with a reason."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nmoe_data.errors import DataError
from nmoe_data.prep import PrepProgress
from nmoe_train.config import Config
from nmoe_train.data import TrainingData, prepare
from nmoe_train.errors import TrainError

Tiny = Callable[..., Config]


def text(folder: Path, count: int = 60) -> Path:
    folder.mkdir()
    lines = (json.dumps({"text": f"document {n} of a few words"}) for n in range(count))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def open_from(tiny: Tiny, source: Path, out: Path) -> TrainingData:
    overrides = {"data.text": str(source), "data.tokenizer": "bytes", "data.held_out": 0.2}
    return prepare(tiny(**overrides, **{"data.dir": str(out)}), lambda _: None)


def test_the_fingerprint_is_that_of_the_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_from(tiny, text(tmp_path / "here"), tmp_path / "one")
    monkeypatch.setattr(sys, "argv", ["another", "command"])
    moved = open_from(tiny, text(tmp_path / "there"), tmp_path / "two")
    other = open_from(tiny, text(tmp_path / "more", count=61), tmp_path / "three")
    assert first.train.tokens == moved.train.tokens
    assert first.fingerprint == moved.fingerprint
    assert first.fingerprint != other.fingerprint


def test_shards_are_made_beside_the_run_once(tiny: Tiny, tmp_path: Path) -> None:
    overrides = {"data.text": str(text(tmp_path / "text")), "data.tokenizer": "bytes"}
    config = tiny(**overrides, **{"data.dir": None, "data.held_out": 0.3})
    heard: list[PrepProgress] = []
    data = prepare(config, heard.append)
    assert config.data_dir == tmp_path / "run" / "data"
    assert (tmp_path / "run" / "data" / "train" / "manifest.json").exists()
    assert heard
    assert data.train.documents + data.held_out.documents == 60
    stamp = (config.data_dir / "train" / "manifest.json").stat().st_mtime_ns
    again = prepare(config, lambda _: None)
    assert again.fingerprint == data.fingerprint
    assert (config.data_dir / "train" / "manifest.json").stat().st_mtime_ns == stamp


def test_the_limit_is_in_megabytes(tiny: Tiny, tmp_path: Path) -> None:
    overrides = {"data.text": str(text(tmp_path / "text")), "data.tokenizer": "bytes"}
    config = tiny(**overrides, **{"data.dir": str(tmp_path / "out"), "data.limit_mb": 0.0008})
    data = prepare(config, lambda _: None)
    read = data.train.tokens + data.held_out.tokens
    assert 800 <= read < 900


def test_missing_shards_are_an_error(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(TrainError) as caught:
        prepare(tiny(**{"data.dir": str(tmp_path / "nothing")}), lambda _: None)
    assert caught.value.code == "E-DATA-MISSING"


def flip_a_byte(data_dir: Path, folder: Path, part: str) -> Path:
    """A copy of the shards in which one token of `part` is another one; returns that shard."""
    shutil.copytree(data_dir, folder)
    shard = folder / part / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    # The last token ends a document; the one before is a byte of text, and stays one.
    content[-4] ^= 1
    shard.write_bytes(bytes(content))
    return shard


@pytest.mark.parametrize("part", ["train", "held-out"])
def test_a_shard_whose_bytes_changed_is_refused_at_every_start(
    tiny: Tiny, data_dir: Path, tmp_path: Path, part: str
) -> None:
    shard = flip_a_byte(data_dir, tmp_path / "copy", part)
    overrides = {"data.dir": str(tmp_path / "copy")}
    with pytest.raises(DataError) as caught:
        prepare(tiny(**overrides), lambda _: None)
    assert caught.value.code == "E-SHARD-CHECKSUM"
    assert str(shard) in str(caught.value)
    trusted = prepare(tiny(**overrides, **{"data.verify": False}), lambda _: None)
    assert trusted.train.tokens > 0


def test_a_shard_that_changed_since_it_was_made_is_refused_when_the_run_starts_again(
    tiny: Tiny, tmp_path: Path
) -> None:
    source = text(tmp_path / "text")
    open_from(tiny, source, tmp_path / "out")
    shard = tmp_path / "out" / "train" / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-4] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(DataError) as caught:
        open_from(tiny, source, tmp_path / "out")
    assert caught.value.code == "E-SHARD-CHECKSUM"


def test_one_long_document_is_validated_on_its_end(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one long document " * 40)
    overrides = {"data.text": str(tmp_path / "text.txt"), "data.tokenizer": "bytes"}
    settings = {"data.held_out": 0.1, "data.dir": str(tmp_path / "out")}
    got = prepare(tiny(**overrides, **settings), lambda _: None)
    # 720 bytes and the end of the document.
    assert (got.train.tokens, got.held_out.tokens) == (649, 72)
    end = got.held_out.read(0, 72).tolist()
    assert bytes(end[:-1]) == (b"one long document " * 40)[-71:]
    assert end[-1] == got.tokenizer.end_of_document_id
    assert got.note == (
        "too few documents to hold one out: validating on the last 72 tokens instead"
    )
    assert ", first 649 tokens" in got.fingerprint


@pytest.fixture
def without_held_out(data_dir: Path, tmp_path: Path) -> str:
    """The shards, as if one long document had left nothing to hold out."""
    shutil.copytree(data_dir, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "held-out")
    return str(tmp_path / "copy")


def test_the_end_of_the_stream_is_held_out_where_no_document_is(
    tiny: Tiny, data: TrainingData, without_held_out: str
) -> None:
    got = prepare(tiny(**{"data.dir": without_held_out, "data.held_out": 0.1}), lambda _: None)
    length = round(0.1 * data.train.tokens)
    cut = data.train.tokens - length
    assert (got.train.tokens, got.held_out.tokens) == (cut, length)
    whole = data.train.read(0, data.train.tokens)
    assert (got.train.read(0, cut) == whole[:cut]).all()
    assert (got.held_out.read(0, length) == whole[cut:]).all()
    assert got.note is not None
    assert data.note is None
    # Another cut trains on other tokens.
    other = prepare(tiny(**{"data.dir": without_held_out, "data.held_out": 0.2}), lambda _: None)
    assert len({data.fingerprint, got.fingerprint, other.fingerprint}) == 3


@pytest.mark.parametrize(
    "overrides",
    [{"data.held_out": 0.0}, {"train.seq_len": 9000, "model.positions": 9000}],
)
def test_with_nothing_to_hold_out_the_run_is_refused(
    tiny: Tiny, without_held_out: str, overrides: dict[str, float]
) -> None:
    with pytest.raises(TrainError) as caught:
        prepare(tiny(**{"data.dir": without_held_out, **overrides}), lambda _: None)
    assert caught.value.code == "E-DATA-HELD-OUT"
