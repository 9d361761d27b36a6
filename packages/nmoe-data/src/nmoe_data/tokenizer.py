"""Text to token ids and back: bytes, a Hugging Face `tokenizer.json`, or a BPE trained here.

Every tokenizer has one id that ends a document, and no document text can produce it: a literal
`<|endoftext|>` in a text stays text. A tokenizer's identity is the SHA-256 of its canonical JSON
and its end token, so two files with the same hash give the same ids.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, os_errors

END_OF_DOCUMENT = "<|endoftext|>"
# Names of the token that ends a document in published tokenizers, in order of preference.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")
CONFIG_NAME = "tokenizer_config.json"
SMALLEST_BPE = 257
BYTES_JSON = orjson.dumps(
    {"type": "nmoe-bytes", "version": 1, "end_of_document_id": 256}, option=orjson.OPT_INDENT_2
)
logger = logging.getLogger("nmoe_data")


class Tokenizer(ABC):
    """Text to ids and back.

    name: what to call it ("bytes", "bpe-4096"). hash: SHA-256 (hex) of the canonical JSON and the
    end token. vocab_size: largest id + 1. end_of_document_id: the id that ends a document; never
    made from text.
    """

    name: str
    hash: str
    vocab_size: int
    end_of_document_id: int

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without any special id; the same for any batching."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> bytes:
        """Returns the canonical JSON, which `load_tokenizer` reads back."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text, without any special id."""
        return self.encode_batch([text])[0]

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer as JSON.

        Raises DataError: those of `os_errors`, if the file cannot be written.
        """
        path = Path(path)
        with os_errors("write the tokenizer", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, self.to_json())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255 and 256 for the end of a document."""

    name = "bytes"
    hash = hashlib.sha256(BYTES_JSON).hexdigest()
    vocab_size = 257
    end_of_document_id = 256

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        parts = (bytes((i,)) if i < 256 else END_OF_DOCUMENT.encode() for i in ids)
        return b"".join(parts).decode(errors="replace")

    def to_json(self) -> bytes:
        return BYTES_JSON


class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer, with its special tokens switched off for document text."""

    def __init__(self, inner: tokenizers.Tokenizer, end_token: str) -> None:
        # Truncation or padding saved in the file would cut documents or add ids in silence.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner = inner
        self._end_token = end_token
        self._json = inner.to_str().encode()
        self.hash = hashlib.sha256(self._json + end_token.encode()).hexdigest()
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document_id = vocabulary[end_token]
        self.name = f"{type(inner.model).__name__.lower()}-{self.vocab_size}"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> bytes:
        return self._json

    def save(self, path: str | Path) -> None:
        """Writes the JSON, and a `tokenizer_config.json` if only that tells the end token."""
        path = Path(path)
        super().save(path)
        if self._end_token != _first_known_end(self._inner):
            content = orjson.dumps({"eos_token": self._end_token}, option=orjson.OPT_INDENT_2)
            with os_errors("write the tokenizer", path):
                atomic_write(path.with_name(CONFIG_NAME), content)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Returns the tokenizer that `spec` names: "bytes" or the path of a `tokenizer.json`.

    The end of a document is the `eos_token` of a `tokenizer_config.json` beside the file, else the
    first known name in the vocabulary (`<|endoftext|>`, `</s>`, ...).

    Raises DataError: E-TOKENIZER-MISSING, E-TOKENIZER-INVALID, E-TOKENIZER-NO-END, or those of
    `os_errors` if it cannot be read.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    with os_errors("read the tokenizer", path):
        if not path.is_file():
            raise DataError(
                "E-TOKENIZER-MISSING",
                f"no tokenizer at {path}",
                'give "bytes" or the path of a tokenizer.json',
            )
        content = path.read_bytes()
        if content == BYTES_JSON:
            return ByteTokenizer()
        inner = _parse(content, path)
        return JsonTokenizer(inner, _end_token(inner, path))


def _parse(content: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(
            "E-TOKENIZER-INVALID",
            f"{path} is not a Hugging Face tokenizer ({error})",
            "give a tokenizer.json written by the tokenizers library",
        ) from error


def _end_token(inner: tokenizers.Tokenizer, path: Path) -> str:
    end = _configured_end(path.with_name(CONFIG_NAME)) or _first_known_end(inner)
    if end is None or inner.token_to_id(end) is None:
        raise DataError(
            "E-TOKENIZER-NO-END",
            f"{path} has no token {end or 'that ends a document'}",
            f'put a {CONFIG_NAME} beside it whose "eos_token" it has',
        )
    return end


def _first_known_end(inner: tokenizers.Tokenizer) -> str | None:
    return next((name for name in KNOWN_ENDS if inner.token_to_id(name) is not None), None)


def _configured_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        config: Any = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(
            "E-TOKENIZER-INVALID", f"{path} is not JSON ({error})", "mend or remove it"
        ) from error
    end = config.get("eos_token") if isinstance(config, dict) else None
    return end.get("content") if isinstance(end, dict) else end


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (GPT-2 splitting); the same texts give the same tokenizer.

    Id 0 ends a document, then come the 256 bytes, then the merges. A small corpus may give fewer
    than `vocab_size` ids.

    Raises DataError: E-VOCAB-SIZE if `vocab_size` has no room for every byte and the end id.
    """
    if vocab_size < SMALLEST_BPE:
        raise DataError(
            "E-VOCAB-SIZE",
            f"a vocabulary of {vocab_size} ids is too small",
            f"give at least {SMALLEST_BPE}",
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = JsonTokenizer(inner, END_OF_DOCUMENT)
    if tokenizer.vocab_size < vocab_size:
        logger.warning("the text gave %d of %d ids", tokenizer.vocab_size, vocab_size)
    return tokenizer
