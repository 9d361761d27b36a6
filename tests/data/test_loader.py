"""The loader: a bijection per epoch, one global batch on any number of ranks, no cursor."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_data.errors import DataError
from nmoe_data.loader import Loader, TokenDataset, open_dataset, permute
from nmoe_data.prep import prep
from nmoe_data.stats import unigram_loss
from nmoe_data.tokenizer import load_tokenizer

END = 256
KNOWN_ORDER = [7, 5, 8, 0, 2, 9, 1, 3, 6, 4]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = np.random.default_rng(3)
    return [
        f"{n} " + "".join(map(chr, draw.integers(97, 123, draw.integers(0, 40)))) for n in range(90)
    ]


@pytest.fixture(scope="module")
def dataset(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Ninety small documents in shards of about 150 tokens, so that windows cross shards."""
    folder = tmp_path_factory.mktemp("loader")
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    result = prep(folder, folder / "out", tokenizer="bytes", shard_tokens=150)
    assert len(list(result.train.glob("shard-*.idx.npy"))) > 5
    return open_dataset(result.train, verify=True)


@pytest.fixture(scope="module")
def stream(texts: list[str]) -> list[int]:
    """The tokens of all documents, made without the code under test."""
    return [i for text in texts for i in (*text.encode(), END)]


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
def test_the_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_seeds_and_epochs_give_different_orders_and_none_is_the_identity() -> None:
    indices = np.arange(1000, dtype=np.uint64)
    orders = [indices] + [permute(indices, 1000, s, e) for s in range(5) for e in range(5)]
    assert len({order.tobytes() for order in orders}) == 26


def test_a_permutation_is_spread_evenly() -> None:
    # Of 4096 indices in 16 blocks, each block sends about 16 to each block: chi-square with
    # 225 degrees of freedom stays below 330 but once in 200,000.
    for seed in range(30):
        order = permute(np.arange(4096, dtype=np.uint64), 4096, seed, 0)
        table = np.zeros((16, 16))
        np.add.at(table, (np.arange(4096) // 256, (order // 256).astype(int)), 1)
        assert ((table - 16) ** 2 / 16).sum() < 330


def test_the_order_is_the_same_in_every_version() -> None:
    order = permute(np.arange(10, dtype=np.uint64), 10, 1, 0)
    assert order.tolist() == KNOWN_ORDER


def test_the_second_epoch_comes_in_another_order(dataset: TokenDataset) -> None:
    loader = Loader(dataset, seq_len=16, seed=0)
    first, second = (loader.batch(epoch, loader.windows).tokens for epoch in range(2))
    assert (first != second).any(axis=1).mean() > 0.9


def test_a_huge_dataset_needs_no_memory() -> None:
    indices = np.arange(100, dtype=np.uint64)
    order = permute(indices, 10**15, 0, 0)
    assert len(set(order.tolist())) == 100
    assert int(order.max()) < 10**15


@given(
    seq_len=st.integers(1, 400),
    step=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_rank_slices_join_to_the_global_batch(
    dataset: TokenDataset, seq_len: int, step: int, rows: int, ranks: int, seed: int
) -> None:
    loader = Loader(dataset, seq_len=seq_len, seed=seed)
    size = rows * ranks
    whole = loader.batch(step, size)
    parts = [loader.batch(step, size, rank, ranks) for rank in range(ranks)]
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), whole.tokens)
    assert np.array_equal(np.concatenate([part.documents for part in parts]), whole.documents)


@given(seq_len=st.integers(2, 300), batch_size=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_each_epoch_holds_each_window_once(
    dataset: TokenDataset, stream: list[int], seq_len: int, batch_size: int, seed: int
) -> None:
    loader = Loader(dataset, seq_len=seq_len, seed=seed)
    starts = range(0, len(stream) - seq_len, seq_len)
    windows = Counter(tuple(stream[start : start + seq_len + 1]) for start in starts)
    assert loader.windows == len(starts)
    steps = -(-2 * loader.windows // batch_size)
    rows = [tuple(row) for s in range(steps) for row in loader.batch(s, batch_size).tokens.tolist()]
    for epoch in range(2):
        assert Counter(rows[epoch * loader.windows : (epoch + 1) * loader.windows]) == windows


def test_a_batch_does_not_depend_on_what_was_read_before(dataset: TokenDataset) -> None:
    one, other = (Loader(dataset, seq_len=16, seed=4) for _ in range(2))
    for step in (9, 3, 0):
        one.batch(step, 8)
    assert np.array_equal(one.batch(7, 8).tokens, other.batch(7, 8).tokens)
    assert not np.array_equal(one.batch(7, 8).tokens, other.batch(8, 8).tokens)


@given(seq_len=st.integers(1, 500), count=st.integers(1, 50))
@settings(deadline=None)
def test_sequential_reading_covers_each_window_once_in_order(
    dataset: TokenDataset, stream: list[int], seq_len: int, count: int
) -> None:
    loader = Loader(dataset, seq_len=seq_len, seed=0)
    parts = [loader.sequential(i, count).tokens for i in range(0, loader.windows, count)]
    rows = np.concatenate(parts)
    starts = range(0, len(stream) - seq_len, seq_len)
    assert rows.tolist() == [stream[start : start + seq_len + 1] for start in starts]


def test_document_numbers_rise_after_each_end_of_document(dataset: TokenDataset) -> None:
    batch = Loader(dataset, seq_len=64, seed=0).batch(0, 16)
    assert (batch.tokens.dtype, batch.documents.dtype) == (np.int64, np.int32)
    assert batch.tokens.shape == batch.documents.shape == (16, 65)
    for tokens, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
        number = 0
        for token, document in zip(tokens, documents, strict=True):
            assert document == number
            number += token == END


def test_counts_of_an_opened_dataset(dataset: TokenDataset, stream: list[int]) -> None:
    assert (dataset.tokens, dataset.documents) == (len(stream), 90)
    assert (dataset.vocab_size, dataset.end_of_document_id) == (257, END)
    assert dataset.read(0, len(stream)).tolist() == stream


@given(data=st.data())
@settings(deadline=None)
def test_a_part_of_a_part_is_that_piece_of_the_stream(
    dataset: TokenDataset, stream: list[int], data
) -> None:
    whole, first, part = stream, 0, dataset
    for _ in range(2):
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        part, whole, first = part.part(start, stop), whole[start:stop], first + start
    assert part.tokens == len(whole)
    assert [i for chunk in part.chunks() for i in chunk.tolist()] == whole
    assert part.documents == whole.count(END)
    if len(whole) > 8:
        rows = Loader(part, seq_len=8, seed=0).sequential(0, 1).tokens
        assert rows.tolist() == [stream[first : first + 9]]
    with pytest.raises(DataError, match="E-ARGUMENT"):
        part.part(0, len(whole) + 1)
    assert dataset.read(0, dataset.tokens).tolist() == stream


def test_data_smaller_than_a_window_is_refused_with_both_sizes(
    dataset: TokenDataset, stream: list[int]
) -> None:
    assert Loader(dataset, seq_len=len(stream) - 1, seed=0).windows == 1
    with pytest.raises(DataError, match=f"E-DATA-TOO-SMALL.*{len(stream)} tokens.*{len(stream)}"):
        Loader(dataset, seq_len=len(stream), seed=0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((0, 10, 0, 4), "E-BATCH-RANKS"),
        ((0, 0), "E-BATCH-RANKS"),
        ((0, 8, 2, 2), "E-ARGUMENT"),
        ((-1, 8), "E-ARGUMENT"),
    ],
)
def test_rows_that_cannot_be_shared_are_refused(
    dataset: TokenDataset, arguments: tuple[int, ...], code: str
) -> None:
    with pytest.raises(DataError, match=code):
        Loader(dataset, seq_len=8, seed=0).batch(*arguments)


def test_windows_outside_the_dataset_are_refused(dataset: TokenDataset) -> None:
    loader = Loader(dataset, seq_len=8, seed=0)
    with pytest.raises(DataError, match="E-ARGUMENT"):
        loader.sequential(loader.windows, 1)


def test_unigram_loss_is_that_of_smoothed_counts(tmp_path: Path) -> None:
    sides = {"train": "aaab", "held": "abcc"}
    datasets = {}
    for side, text in sides.items():
        (tmp_path / f"{side}.txt").write_text(text)
        result = prep(tmp_path / f"{side}.txt", tmp_path / side, tokenizer="bytes")
        datasets[side] = open_dataset(result.train)
    counts = Counter([*b"aaab", END])
    targets = [*b"abcc", END]
    expected = -np.mean([np.log((counts[t] + 1) / (5 + 257)) for t in targets])
    loss = unigram_loss(datasets["train"], datasets["held"])
    assert loss == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_refuses_two_tokenizers(tmp_path: Path, dataset: TokenDataset) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    other = open_dataset(prep(tmp_path / "a.txt", tmp_path / "o", tokenizer="bpe:300").train)
    assert load_tokenizer(tmp_path / "o" / "tokenizer.json").hash != load_tokenizer("bytes").hash
    with pytest.raises(DataError, match="E-TOKENIZER-DRIFT"):
        unigram_loss(dataset, other)
