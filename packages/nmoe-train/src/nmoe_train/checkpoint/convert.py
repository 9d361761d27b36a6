"""A checkpoint of any layout as other files: its weights, or one file that a run resumes from.

Weights go, whole and under their names (`layers.3.moe.experts.17.down`), into as few safetensors
files as a size allows, beside `weights.json`, which says what they are of. A checkpoint in one file
is a run folder with that checkpoint. Both appear under their name once they are complete.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from nmoe_data.files import atomic_write, sync_path
from torch import Tensor

from nmoe_train.checkpoint.body import Body
from nmoe_train.checkpoint.folder import Checkpoint, read_checkpoint, write_checkpoint
from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import CORRUPT, verify
from nmoe_train.storage.listing import complete_of, fetch_checkpoint
from nmoe_train.storage.target import is_url

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEMA_VERSION = 1
MODEL = "model."
OWN_META = ("schema_version", "step", "files", "tensors")
"""What of meta.json is about its folder, and not about the training."""


def convert_weights(
    source: str | Path,
    out: Path,
    dtype: str | None,
    file_bytes: float,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Writes the weights of a checkpoint to the new folder `out`; its files.

    `source`: a checkpoint, or a run, whose newest is taken, as a folder or a URL, which is copied
    beside `out` meanwhile. `dtype` (fp32, bf16, fp16) is that of the matrices; vectors, such as
    norms and the router's bias, stay as they are. A file has at most `file_bytes`, unless one
    tensor has more. Memory holds one file. `tell` shows a line to the user. Raises TrainError
    `E-CONVERT`, and what `sound_checkpoint` and `fetch_checkpoint` do.
    """
    if dtype is not None and dtype not in DTYPES:
        raise TrainError("E-CONVERT", f"--dtype {dtype} is not known", f"use {', '.join(DTYPES)}")
    _check_new(out)
    with _new_folder(out) as folder, _found(source, folder, tell) as checkpoint:
        files = _write_weights(checkpoint, folder, dtype, file_bytes)
    return [out / name for name in files]


def _write_weights(
    checkpoint: Checkpoint, folder: Path, dtype: str | None, file_bytes: float
) -> list[str]:
    """All files of a checkpoint's weights, and weights.json; the names of the former."""
    saved = checkpoint.tensors()
    places: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    sizes = {name: _bytes(checkpoint, name, dtype) for name in saved if name.startswith(MODEL)}
    groups = list(_groups(sizes, file_bytes))
    for number, names in enumerate(groups, start=1):
        file = folder / f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
        body = Body({n.removeprefix(MODEL): _cast(saved[n], dtype) for n in names})
        body.write(file)
        files[file.name] = {"sha256": body.sha256, "bytes": file.stat().st_size}
        places |= {name.removeprefix(MODEL): file.name for name in names}
    about = {
        "schema_version": SCHEMA_VERSION,
        "step": checkpoint.step,
        **{key: checkpoint.meta.get(key) for key in ("tokens", "fingerprint", "fields")},
        "files": files,
        "tensors": places,
    }
    atomic_write(folder / "weights.json", json.dumps(about, indent=1).encode())
    return list(files)


def convert_checkpoint(
    source: str | Path, out: Path, tell: Callable[[str], None] = lambda line: None
) -> Path:
    """Writes a checkpoint, with all that a resume needs, in one file to the new run folder `out`.

    Memory holds the whole state. Raises what `convert_weights` does.
    """
    _check_new(out)
    with _new_folder(out) as folder, _found(source, folder, tell) as checkpoint:
        meta = {key: value for key, value in checkpoint.meta.items() if key not in OWN_META}
        root, tensors = folder / "checkpoints", dict(checkpoint.tensors())
        written = write_checkpoint(root, checkpoint.step, tensors, meta, keep=1)
    return out / written.relative_to(folder)


@contextmanager
def _found(source: str | Path, folder: Path, tell: Callable[[str], None]) -> Iterator[Checkpoint]:
    """The checkpoint at `source`; what is copied of a URL lies in `folder` during the block."""
    if not is_url(str(source)):
        yield sound_checkpoint(Path(source))
        return
    copied = folder / "copied"
    with _or_another():
        checkpoint = fetch_checkpoint(str(source), copied, tell)
    yield read_checkpoint(checkpoint)
    shutil.rmtree(copied)


def sound_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at `source`, or the newest complete one of a run folder, verified.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND`, `E-CHECKPOINT-CORRUPT`, `E-CHECKPOINT-VERSION`.
    """
    newest, *_ = complete_of(source)
    with _or_another():
        verify(newest)
    return read_checkpoint(newest)


@contextmanager
def _or_another() -> Iterator[None]:
    """Has the error of a damaged checkpoint say how to find one that is sound."""
    try:
        yield
    except TrainError as error:
        if error.code != CORRUPT:
            raise
        remedy = "`nmoe-train checkpoint verify` says which are sound; name one of them"
        raise TrainError(CORRUPT, error.what, remedy) from error


def _check_new(out: Path) -> None:
    """Before anything is read: nothing is overwritten."""
    if out.exists():
        raise TrainError("E-CONVERT", f"{out} exists", "name a new folder")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end of the block, or goes where that raises."""
    made = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_path(temporary)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # somebody else may have put something there
                folder.rmdir()
        raise
    sync_path(out.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _groups(sizes: Mapping[str, int], file_bytes: float) -> Iterator[list[str]]:
    """Names in order, in groups that fit into files."""
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + size > file_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _bytes(checkpoint: Checkpoint, name: str, dtype: str | None) -> int:
    """Bytes that a tensor takes in its file."""
    place = checkpoint.meta["tensors"][name]
    whole = torch.empty(place["shape"], dtype=getattr(torch, place["dtype"]), device="meta")
    return _cast(whole, dtype).nbytes


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    """A matrix in another type; everything else as it is."""
    if dtype is None or tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor
    return tensor.to(DTYPES[dtype])
