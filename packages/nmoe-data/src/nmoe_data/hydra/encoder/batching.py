"""What the neural encoders share: tokens of many texts, batches of like length, hashes of folders.

Texts are cut to MAX_TOKENS tokens, special tokens included, and before that to
CHARACTERS_PER_TOKEN characters for each, so that a text of 30 MB costs no more than any other. A
batch holds documents of like length, as many as fit into a budget of padded tokens.

Letters: N documents, B of a batch, L tokens of the longest.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors, sha256_file

MAX_TOKENS = 512
CHARACTERS_PER_TOKEN = 16
# Texts that are tokenised together, while the encoder works on those before.
WINDOW = 2048

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """ids, mask: int64 [B, L], padding has mask 0. rows: which texts these are."""

    ids: IdArray
    mask: IdArray
    rows: IdArray

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return bool(self.mask.all())


class BatchTokenizer:
    """Texts to padded batches, tokenised in a thread one window ahead.

    tokenizer: its truncation and padding are set here. max_tokens: of a text. pad_id: what fills
    up. budget: most padded tokens in a batch.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, max_tokens: int, pad_id: int, budget: int
    ) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens)
        # A special token's text in a document is text.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._most_characters = max_tokens * CHARACTERS_PER_TOKEN
        self._pad_id = pad_id
        self._budget = budget

    def batches(self, texts: Sequence[str]) -> Iterator[TokenBatch]:
        """Yields every text once, window after window, by length within each."""
        starts = range(0, len(texts), WINDOW)
        with ThreadPoolExecutor(1) as thread:
            pending = [thread.submit(self._tokens, texts, start) for start in starts[:1]]
            for start in starts:
                tokens = pending.pop().result()
                if start + WINDOW < len(texts):
                    pending.append(thread.submit(self._tokens, texts, start + WINDOW))
                yield from self._batched(tokens, start)

    def _tokens(self, texts: Sequence[str], start: int) -> list[list[int]]:
        window = [text[: self._most_characters] for text in texts[start : start + WINDOW]]
        return [found.ids for found in self._tokenizer.encode_batch_fast(window)]

    def _batched(self, tokens: list[list[int]], start: int) -> Iterator[TokenBatch]:
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        order = np.argsort(lengths, kind="stable")[::-1]
        first = 0
        while first < len(order):
            # The first is the longest of its batch.
            longest = max(int(lengths[order[first]]), 1)
            rows = order[first : first + max(1, self._budget // longest)]
            yield self._padded([tokens[row] for row in rows], lengths[rows], longest, rows + start)
            first += len(rows)

    def _padded(
        self, tokens: list[list[int]], lengths: IdArray, longest: int, rows: IdArray
    ) -> TokenBatch:
        filled = np.arange(longest) < lengths[:, None]
        ids = np.full((len(tokens), longest), self._pad_id, np.int64)
        ids[filled] = np.fromiter((id for part in tokens for id in part), np.int64, lengths.sum())
        return TokenBatch(ids, filled.astype(np.int64), rows)


def masked_mean(states: npt.NDArray[np.float32], mask: IdArray) -> npt.NDArray[np.float32]:
    """Returns the mean [B, W] of states [B, L, W] where `mask` [B, L] is 1; zero without tokens."""
    weights = mask[:, :, None].astype(np.float32)
    total = (states * weights).sum(axis=1)
    return np.asarray(total / np.maximum(weights.sum(axis=1), 1.0), np.float32)


def folder_hash(folder: Path, patterns: Sequence[str], settings: str) -> str:
    """Returns SHA-256 (hex) of the files that match `patterns`, their names, and `settings`."""
    digest = hashlib.sha256(settings.encode())
    with os_errors("read the model in", folder):
        names = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        for path in names:
            digest.update(f"\0{path.name}\0{sha256_file(path)}".encode())
    return digest.hexdigest()


def unusable(name: str, why: str, remedy: str) -> DataError:
    """Returns the error for an encoder that cannot be opened."""
    return DataError("E-HYDRA-ENCODER", f"{name}: {why}", remedy)
