"""A checkpoint of any layout as other files: its weights, or one file that a run resumes from.

Weights go, whole and under their names (`layers.3.moe.experts.17.down`), into as few safetensors
files as a size allows, beside `weights.json`, which says what they are of. A checkpoint in one file
is a run folder with that checkpoint. Both appear under their name once they are complete.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from nmoe_data.files import atomic_write, sync_path
from torch import Tensor

from nmoe_train.checkpoint.body import Body
from nmoe_train.checkpoint.folder import Checkpoint, read_checkpoint, write_checkpoint
from nmoe_train.checkpoint.listing import folders_of, not_found
from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import COMPLETE, verify

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEMA_VERSION = 1
MODEL = "model."
OWN_META = ("schema_version", "step", "files", "tensors")
"""What of meta.json is about its folder, and not about the training."""


def convert_weights(source: Path, out: Path, dtype: str | None, file_bytes: float) -> list[Path]:
    """Writes the weights of a checkpoint to the new folder `out`; its files.

    `source`: a checkpoint folder, or a run's, whose newest is taken. `dtype` (fp32, bf16, fp16) is
    that of the matrices; vectors, such as norms and the router's bias, stay as they are. A file has
    at most `file_bytes`, unless one tensor has more. Memory holds one file. Raises TrainError
    `E-CONVERT`, and what `sound_checkpoint` does.
    """
    if dtype is not None and dtype not in DTYPES:
        raise TrainError("E-CONVERT", f"--dtype {dtype} is not known", f"use {', '.join(DTYPES)}")
    checkpoint = sound_checkpoint(source)
    temporary = _new_folder(out)
    saved = checkpoint.tensors()
    places: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    sizes = {name: _bytes(checkpoint, name, dtype) for name in saved if name.startswith(MODEL)}
    groups = list(_groups(sizes, file_bytes))
    for number, names in enumerate(groups, start=1):
        file = temporary / f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
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
    atomic_write(temporary / "weights.json", json.dumps(about, indent=1).encode())
    _appear(temporary, out)
    return [out / name for name in files]


def convert_checkpoint(source: Path, out: Path) -> Path:
    """Writes a checkpoint, with all that a resume needs, in one file to the new run folder `out`.

    Memory holds the whole state. Raises what `convert_weights` does.
    """
    checkpoint = sound_checkpoint(source)
    temporary = _new_folder(out)
    meta = {key: value for key, value in checkpoint.meta.items() if key not in OWN_META}
    root = temporary / "checkpoints"
    folder = write_checkpoint(root, checkpoint.step, dict(checkpoint.tensors()), meta, keep=1)
    _appear(temporary, out)
    return out / folder.relative_to(temporary)


def sound_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at `source`, or the newest complete one of a run folder, verified.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND`, `E-CHECKPOINT-CORRUPT`, `E-CHECKPOINT-VERSION`.
    """
    complete = [folder for folder in folders_of(source) if (folder / COMPLETE).exists()]
    if not complete:
        raise not_found(source, "no complete checkpoint")
    verify(complete[0])
    return read_checkpoint(complete[0])


def _new_folder(out: Path) -> Path:
    """A folder beside `out` that becomes it."""
    if out.exists():
        raise TrainError("E-CONVERT", f"{out} exists", "name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    temporary.chmod(0o777 & ~_umask())
    return temporary


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _appear(temporary: Path, out: Path) -> None:
    sync_path(temporary)
    temporary.rename(out)
    sync_path(out.parent)


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
