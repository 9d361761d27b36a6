"""From token shards to the tensors of a step, and from text to token shards where they are missing.

The loader of nmoe-data is a function of (seed, step), so nothing here keeps a position.
Letters: B sequences, S positions.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from nmoe_data.errors import DataError
from nmoe_data.loader import Batch, TokenDataset, open_dataset
from nmoe_data.prep import PrepProgress, prep
from nmoe_data.tokenizer import Tokenizer, load_tokenizer
from torch import Tensor

from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.model.loss import IGNORED


@dataclass(frozen=True)
class TrainingData:
    """Open shards of a run."""

    train: TokenDataset
    held_out: TokenDataset
    tokenizer: Tokenizer
    fingerprint: str
    """Changes when any token of the training shards does, and with nothing else."""
    note: str | None = None
    """What the user should know of how they were divided."""


@dataclass(frozen=True)
class Step:
    """Tensors of a batch, or of a part of one."""

    inputs_BS: Tensor
    documents_BS: Tensor
    targets_BS: Tensor
    """`IGNORED` where the next token belongs to another document."""
    predictions: int
    """Targets that count in the whole batch, over which the loss is a mean."""


def to_step(batch: Batch) -> Step:
    """Inputs and targets of a loader batch, on the CPU, as if it were the whole batch."""
    tokens = torch.from_numpy(batch.tokens)
    documents = torch.from_numpy(batch.documents)
    same_document = documents[:, 1:] == documents[:, :-1]
    targets = torch.where(same_document, tokens[:, 1:], IGNORED)
    predictions = int((targets != IGNORED).sum())
    return Step(tokens[:, :-1], documents[:, :-1], targets, predictions)


def prepare(config: Config, progress: Callable[[PrepProgress], None]) -> TrainingData:
    """Opens the shards of a run, made from `data.text` first if they are not there.

    `progress` hears how far the text is read. Raises TrainError or nmoe_data's DataError.
    """
    note = None
    if config.data.text is not None:
        note = _make_shards(config, config.data.text, progress)
    data = open_prepared(config, verify=config.data.verify)
    return data if note is None else replace(data, note=note)


def open_prepared(config: Config, *, verify: bool) -> TrainingData:
    """Opens the shards of a run, which must be there; `verify` checks their checksums first.

    Raises TrainError or nmoe_data's DataError.
    """
    if not (config.data_dir / "train").is_dir():
        raise TrainError(
            "E-DATA-MISSING",
            f"no token shards under {config.data_dir}",
            "set data.text to make them, or data.dir to a folder made by `nmoe-data prep`",
        )
    return _open(config.data_dir, config, verify)


def _make_shards(config: Config, text: str, progress: Callable[[PrepProgress], None]) -> str | None:
    """Makes the shards unless they are there; a note where they are of an earlier state of it."""
    limit_mb, folder = config.data.limit_mb, config.data_dir
    try:
        prep(
            text,
            folder,
            tokenizer=config.data.tokenizer,
            held_out=config.data.held_out,
            limit_bytes=None if limit_mb is None else round(limit_mb * 1e6),
            exclude=[config.run.dir],
            progress=progress,
        )
    except DataError as error:
        if error.code != "E-SOURCE-CHANGED" or not (folder / "train" / "manifest.json").exists():
            raise
        return (
            f"warning the text has changed since {folder} was made of it, which this run keeps to; "
            "another run.dir learns from the text as it is now"
        )
    return None


def _open(folder: Path, config: Config, verify: bool) -> TrainingData:
    train = open_dataset(folder / "train", verify=verify)
    content = [train.manifest.tokenizer["hash"], *(s.sha256 for s in train.manifest.shards)]
    data = TrainingData(
        train=train,
        held_out=train.part(0, 0),
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        fingerprint=hashlib.sha256(" ".join(content).encode()).hexdigest(),
    )
    if (folder / "held-out").is_dir():
        data = replace(data, held_out=open_dataset(folder / "held-out", verify=verify))
    if data.held_out.tokens > config.train.seq_len:
        return data
    return _hold_out_the_tail(data, config)


def _hold_out_the_tail(data: TrainingData, config: Config) -> TrainingData:
    """Validation on the end of the training stream, where too few documents leave none for it.

    One long file is one document, which cannot be held out whole.
    """
    share = config.data.held_out
    length = max(round(share * data.train.tokens), config.train.seq_len + 1)
    if share == 0 or length > data.train.tokens // 2:
        raise TrainError(
            "E-DATA-HELD-OUT",
            f"{config.data_dir} has {data.held_out.tokens} held-out tokens and "
            f"{data.train.tokens} to train on; validation needs {config.train.seq_len + 1}",
            "give more text in another run.dir, or lower train.seq_len",
        )
    cut = data.train.tokens - length
    return replace(
        data,
        train=data.train.part(0, cut),
        held_out=data.train.part(cut, data.train.tokens),
        fingerprint=f"{data.fingerprint}, first {cut} tokens",
        note=f"too few documents to hold one out: validating on the last {length:,} tokens instead",
    )
