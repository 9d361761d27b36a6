"""Tokenizers: text comes back, special ids never come out of text, training repeats exactly."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from nmoe_data.errors import DataError
from nmoe_data.tokenizer import load_tokenizer, train_bpe
from tokenizers import models, pre_tokenizers

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
CORPUS = ["the token goes to the expert", "<|endoftext|> is text here", "naïve café 日本語"] * 20
BPE = train_bpe(CORPUS, 400)


@given(TEXT)
def test_every_text_comes_back_from_its_ids(text: str) -> None:
    for tokenizer in (load_tokenizer("bytes"), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(
    st.lists(st.sampled_from(["<|endoftext|>", "</s>", "<|", "endoftext", "|>", " "])).map("".join)
)
def test_a_special_token_written_in_a_document_stays_text(text: str) -> None:
    for tokenizer in (load_tokenizer("bytes"), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.end_of_document_id not in ids
        assert tokenizer.decode(ids) == text


def test_byte_ids_are_the_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é<") == [0xC3, 0xA9, 0x3C]
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (257, 256)
    assert tokenizer.decode([0x3C, 256]) == "<<|endoftext|>"


def test_a_batch_gives_the_same_ids_as_one_text_at_a_time() -> None:
    assert BPE.encode_batch(CORPUS) == [BPE.encode(text) for text in CORPUS]


def test_training_again_in_another_process_gives_the_same_tokenizer() -> None:
    code = (
        "import sys, json; from nmoe_data.tokenizer import train_bpe;"
        "print(train_bpe(json.loads(sys.argv[1]), 400).hash)"
    )
    command = [sys.executable, "-c", code, orjson.dumps(CORPUS).decode()]
    hashes = {subprocess.check_output(command, text=True).strip() for _ in range(2)}
    assert hashes == {BPE.hash}


def test_the_end_of_a_document_is_id_0_of_a_trained_bpe() -> None:
    assert BPE.end_of_document_id == 0
    assert BPE.decode([0]) == "<|endoftext|>"


@pytest.mark.parametrize("tokenizer", [load_tokenizer("bytes"), BPE], ids=["bytes", "bpe"])
def test_a_saved_tokenizer_loads_as_the_same_one(tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new" / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "new" / "tokenizer.json")
    assert loaded.encode_batch(CORPUS) == tokenizer.encode_batch(CORPUS)
    for name in ("name", "hash", "vocab_size", "end_of_document_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


def _word_level(path: Path, vocabulary: dict[str, int], special: list[str]) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(special)
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(path))


def test_truncation_and_padding_saved_in_a_file_are_switched_off(tmp_path: Path) -> None:
    _word_level(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, ["</s>"])
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a b a b") == [1, 2, 1, 2]


def test_the_configured_end_token_wins_and_survives_a_save(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    _word_level(path, {"?": 0, "a": 1}, ["</s>", "<stop>"])
    first = load_tokenizer(path)
    path.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    tokenizer = load_tokenizer(path)
    assert (first.end_of_document_id, tokenizer.end_of_document_id) == (2, 3)
    assert first.hash != tokenizer.hash
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy" / "tokenizer.json")
    copy = load_tokenizer(tmp_path / "copy" / "tokenizer.json")
    assert (copy.end_of_document_id, copy.hash) == (3, tokenizer.hash)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "E-TOKENIZER-MISSING"),
        (b"not json", "E-TOKENIZER-INVALID"),
        (b"\xff", "E-TOKENIZER-INVALID"),
        (b"{}", "E-TOKENIZER-INVALID"),
    ],
)
def test_a_bad_tokenizer_file_is_one_clear_error(content, code: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=code):
        load_tokenizer(path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    _word_level(tmp_path / "tokenizer.json", {"?": 0, "a": 1}, [])
    with pytest.raises(DataError, match="E-TOKENIZER-NO-END"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="E-VOCAB-SIZE"):
        train_bpe(CORPUS, 256)
    assert train_bpe(CORPUS, 257).vocab_size == 257
