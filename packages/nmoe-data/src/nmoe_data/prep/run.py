"""The entry to a run: checks the arguments, then starts it, goes on, or returns what is there."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nmoe_data.errors import DataError
from nmoe_data.files import only_writer, os_errors
from nmoe_data.prep.pipeline import Pipeline
from nmoe_data.prep.rejects import REJECTED_NAME
from nmoe_data.prep.result import (
    HELD_OUT,
    TOKENIZER_NAME,
    TRAIN,
    PrepResult,
    Progress,
    describe_result,
)
from nmoe_data.prep.state import (
    STATE_NAME,
    RunState,
    check_same_arguments,
    read_state,
)
from nmoe_data.shards import map_dataset, read_manifest
from nmoe_data.shards.layout import MANIFEST_NAME
from nmoe_data.sources import (
    Source,
    SourceFile,
    list_files,
    listing_hash,
    sample_texts,
    source_list,
)
from nmoe_data.tokenizer import Tokenizer, load_tokenizer, train_bpe

DEFAULT_SHARD_TOKENS = 1 << 26
BPE_SAMPLE_BYTES = 4 << 20


def prep(
    source: Source,
    out: Path,
    *,
    tokenizer: Tokenizer | str,
    held_out: float = 0.0,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    limit_bytes: int | None = None,
    text_field: str = "text",
    exclude: Sequence[Path] = (),
    progress: Progress | None = None,
) -> PrepResult:
    """Turns sources into OUT/train (and OUT/held-out), OUT/tokenizer.json and OUT/rejected.jsonl.

    source: a folder, a file, "python-stdlib", or a list of these; files in `out` are no part of it.
    out: made if missing; an unfinished run in it goes on, a finished one is returned as it is.
    tokenizer: a tokenizer, "bytes", the path of a tokenizer.json, or "bpe:N", which trains one of N
    ids on a sample of the source. held_out: the share of documents that goes to OUT/held-out, by
    the hash of their text. shard_tokens: most tokens in a shard, unless one document alone has
    more. limit_bytes: stop after the document with which the accepted text reaches so many bytes.
    text_field: the field of JSON records, or the column of Parquet files, that holds the text.
    exclude: folders that are no part of the source either. progress: called between batches; a
    KeyboardInterrupt raised in it stops the run cleanly.

    Raises DataError for a source, an output folder or arguments that do not work: E-ARGUMENT,
    E-SOURCE-MISSING, E-SOURCE-EMPTY, E-SOURCE-CHANGED, E-NO-TEXT, E-OUT-DIFFERS, E-OUT-NOT-EMPTY,
    E-OUT-BUSY, E-RESUME-STATE, E-TOKENIZER-DRIFT, and those of `load_tokenizer`, `train_bpe` and
    `os_errors`. One bad record never raises: it goes to rejected.jsonl.
    """
    _check_arguments(held_out, shard_tokens, limit_bytes)
    out = Path(out)
    files = list_files(source, [out, *exclude])
    arguments: dict[str, Any] = {
        "sources": source_list(source),
        "source_files": listing_hash(files),
        "tokenizer": _tokenizer_argument(tokenizer),
        "held_out": held_out,
        "shard_tokens": shard_tokens,
        "limit_bytes": limit_bytes,
        "text_field": text_field,
    }
    with os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        with only_writer(out):
            finished = _finished(out, arguments)
            if finished is not None:
                return finished
            state = read_state(out)
            if state is None:
                _check_unused(out)
            else:
                check_same_arguments(out, state.arguments, arguments)
                files = _as_first_typed(files, arguments["sources"], state.arguments["sources"])
            chosen = _choose_tokenizer(tokenizer, files, out, state, text_field)
            state = state or RunState(arguments, _command(), chosen.hash)
            return Pipeline(out, files, chosen, state, progress).run()


def _as_first_typed(files: list[SourceFile], now: list[str], before: list[str]) -> list[SourceFile]:
    """Returns the files under the names of the run that is resumed, so that its bytes stay."""
    names = dict(zip(now, before, strict=True))
    return [replace(file, root=names[file.root]) for file in files]


def _check_arguments(held_out: float, shard_tokens: int, limit_bytes: int | None) -> None:
    if not 0.0 <= held_out < 1.0:
        raise DataError(
            "E-ARGUMENT", f"held-out is {held_out}", "give a share from 0 up to below 1"
        )
    if shard_tokens < 1:
        raise DataError("E-ARGUMENT", f"shard-tokens is {shard_tokens}", "give at least 1")
    if limit_bytes is not None and limit_bytes < 1:
        raise DataError("E-ARGUMENT", f"limit-bytes is {limit_bytes}", "give at least 1")


def _command() -> str:
    """Returns how the program was started, without the folder it is installed in."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _tokenizer_argument(tokenizer: Tokenizer | str) -> str:
    """Returns what two runs must share: the hash, or "bpe:N" for one trained on the source."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.hash
    if str(tokenizer).startswith("bpe:"):
        return tokenizer
    return load_tokenizer(tokenizer).hash


def _choose_tokenizer(
    wanted: Tokenizer | str,
    files: list[SourceFile],
    out: Path,
    state: RunState | None,
    text_field: str,
) -> Tokenizer:
    if isinstance(wanted, Tokenizer):
        return wanted
    if not str(wanted).startswith("bpe:"):
        return load_tokenizer(wanted)
    saved = out / TOKENIZER_NAME
    if state is not None and saved.is_file():
        tokenizer = load_tokenizer(saved)
    else:
        size = wanted.removeprefix("bpe:")
        if not size.isdecimal():
            raise DataError("E-ARGUMENT", f"tokenizer is {wanted}", "give bpe:N, as in bpe:4096")
        tokenizer = train_bpe(sample_texts(files, BPE_SAMPLE_BYTES, 0, text_field), int(size))
    if state is not None and tokenizer.hash != state.tokenizer_hash:
        raise DataError(
            "E-TOKENIZER-DRIFT",
            f"the tokenizer in {out} is not the one the run was begun with",
            "remove the output folder and start again",
        )
    return tokenizer


def _check_unused(out: Path) -> None:
    """Refuses a folder that holds other things; a reject file alone is of a run with no text."""
    names = sorted(path.name for path in out.iterdir() if path.name != STATE_NAME + ".tmp")
    if names not in ([], [REJECTED_NAME]):
        raise DataError(
            "E-OUT-NOT-EMPTY",
            f"{out} holds files of something else ({', '.join(names[:3])})",
            "choose a new or empty folder",
        )


def _finished(out: Path, arguments: dict[str, Any]) -> PrepResult | None:
    """Returns the result of a finished run in `out` after a cheap check, or None."""
    if (out / STATE_NAME).exists() or not (out / TRAIN / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(out / TRAIN)
    check_same_arguments(out, manifest.arguments, arguments)
    manifests = {TRAIN: manifest}
    if arguments["held_out"]:
        manifests[HELD_OUT] = read_manifest(out / HELD_OUT)
    for split, found in manifests.items():
        map_dataset(out / split, found)
    return describe_result(out, manifests, reused=True)
