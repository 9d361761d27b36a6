"""The cache of features: read instead of computed, whole or not there, one per encoder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from nmoe_data.errors import DataError
from nmoe_data.hydra import embeddings
from nmoe_data.hydra.documents import document_id
from nmoe_data.hydra.embeddings import EmbeddingCache, encode_all
from nmoe_data.hydra.encoder import FloatMatrix
from nmoe_data.hydra.encoder.hashed import HashedEncoder
from scipy.sparse import issparse

TEXTS = [f"document {number} of a few words, " + "x" * number for number in range(23)]
IDS = [document_id(text) for text in TEXTS]


class Counting(HashedEncoder):
    """The bundled encoder, dense on demand, that counts what it was asked."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str]) -> FloatMatrix:
        self.encoded += texts
        rows = super().encode(texts)
        return rows[:, -140:].toarray() if self.dense else rows


def plain(matrix: FloatMatrix) -> np.ndarray:
    return matrix.toarray() if issparse(matrix) else matrix


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SHARD_DOCUMENTS", 5)


@pytest.mark.parametrize("dense", [False, True])
def test_rows_are_those_of_the_encoder_in_any_order_and_computed_once(
    tmp_path: Path, dense: bool
) -> None:
    encoder = Counting(dense)
    expected = plain(Counting(dense).encode(TEXTS))
    cache = EmbeddingCache(tmp_path, encoder)
    assert (plain(cache.features(IDS[:12], TEXTS[:12])) == expected[:12]).all()
    order = np.random.default_rng(0).permutation(len(TEXTS))
    ids, texts = [IDS[at] for at in order], [TEXTS[at] for at in order]
    for _ in range(2):
        assert (plain(cache.features(ids, texts)) == expected[order]).all()
    assert sorted(encoder.encoded) == sorted(TEXTS)


def test_a_document_named_twice_has_two_rows(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, Counting(True))
    rows = cache.features([IDS[1], IDS[0], IDS[1]], [TEXTS[1], TEXTS[0], TEXTS[1]])
    assert (rows == Counting(True).encode([TEXTS[1], TEXTS[0], TEXTS[1]])).all()


def test_shards_of_another_encoder_or_type_are_not_read(tmp_path: Path) -> None:
    first, other, half = Counting(True), Counting(True), Counting(True)
    other.hash, half.dtype = "f" * 64, "bfloat16"
    for encoder in (first, other, half):
        EmbeddingCache(tmp_path, encoder).features(IDS, TEXTS)
        assert len(encoder.encoded) == len(TEXTS)


def test_an_interrupted_run_keeps_its_whole_shards(tmp_path: Path) -> None:
    encoder = Counting(True)

    def stop(done: int, total: int) -> None:
        if done >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EmbeddingCache(tmp_path, encoder).features(IDS, TEXTS, stop)
    again = Counting(True)
    rows = EmbeddingCache(tmp_path, again).features(IDS, TEXTS)
    assert (rows == Counting(True).encode(TEXTS)).all()
    assert sorted(encoder.encoded + again.encoded) == sorted(TEXTS)


def test_a_torn_shard_is_never_read(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, Counting(True))
    cache.features(IDS[:10], TEXTS[:10])
    shard = sorted(cache.folder.glob("part-*.npz"))[0]
    whole = shard.read_bytes()
    # What a kill in the middle of a write leaves is a temporary name.
    (cache.folder / "part-00002.npz.tmp").write_bytes(whole[:100])
    assert (cache.features(IDS, TEXTS) == Counting(True).encode(TEXTS)).all()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-300] + b"\1" + whole[-299:]):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match="E-HYDRA-EMBEDDINGS") as error:
            cache.features(IDS, TEXTS)
        assert shard.name in str(error.value)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    shard.write_bytes(bytes(flipped))
    with pytest.raises(DataError, match="E-HYDRA-EMBEDDINGS"):
        cache.features(IDS, TEXTS)


def test_encoding_by_shards_gives_what_encoding_at_once_gives() -> None:
    seen: list[tuple[int, int]] = []
    rows = encode_all(Counting(False), TEXTS, lambda done, total: seen.append((done, total)))
    assert (rows.toarray() == HashedEncoder().encode(TEXTS).toarray()).all()
    assert seen == [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    assert encode_all(Counting(False), []).shape == (0, HashedEncoder.width)
