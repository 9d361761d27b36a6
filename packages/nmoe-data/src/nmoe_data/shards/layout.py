"""What a dataset folder holds: `manifest.json` and, per shard, tokens and an index.

Tokens are a one-dimensional `.npy` of uint16 (vocabulary <= 65,536 ids) or uint32. The index is a
structured `.npy` with a row per document: where it starts in the shard, how many tokens it has
(its end-of-document token included), which source file and which record of it the text came from
(a byte offset, or the row number for Parquet and JSON arrays), and the hash of the text.
"""

import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, os_errors

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
INDEX_DTYPE = np.dtype(
    [("start", "<u8"), ("length", "<u8"), ("source", "<u4"), ("offset", "<u8"), ("id", "<u8")]
)
REDO = "run `nmoe-data prep` again into a new folder"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the narrowest dtype that holds every id of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def shard_name(number: int) -> str:
    """Returns the file name of a shard's tokens."""
    return f"shard-{number:05d}.npy"


def index_name(tokens_name: str) -> str:
    """Returns the file name of the index that belongs to a shard's tokens."""
    return tokens_name.removesuffix(".npy") + ".idx.npy"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What the manifest says about one shard; `documents` counts index rows."""

    name: str
    tokens: int
    documents: int
    sha256: str
    index_sha256: str
    min_id: int
    max_id: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a reader must know about a dataset folder, and where its tokens came from.

    `sources` has a row per source file that was begun: root, name below it, size, sha256.
    `counts` is of the whole run, both splits: records in, documents out, rejected by reason.
    `arguments` are the settings that decide the content; `command` is how the run was started.
    """

    schema_version: int
    tool: str
    command: str
    split: str
    tokenizer: dict[str, Any]
    dtype: str
    tokens: int
    documents: int
    arguments: dict[str, Any]
    counts: dict[str, Any]
    shards: list[ShardInfo]
    sources: list[dict[str, Any]]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder`/manifest.json atomically; the same manifest gives the same bytes."""
    content = orjson.dumps(asdict(manifest), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    atomic_write(folder / MANIFEST_NAME, content)


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `folder`/manifest.json.

    Raises DataError: E-DATASET-MISSING, E-MANIFEST-INVALID or E-SCHEMA-VERSION, or those of
    `os_errors` if it cannot be read.
    """
    path = folder / MANIFEST_NAME
    with os_errors("read", path):
        if not path.is_file():
            raise DataError(
                "E-DATASET-MISSING",
                f"{folder} is not a finished dataset (no {MANIFEST_NAME})",
                "give the train or held-out folder that `nmoe-data prep` wrote",
            )
        data = path.read_bytes()
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError("E-MANIFEST-INVALID", f"{path} is not JSON ({error})", REDO) from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(
            "E-SCHEMA-VERSION",
            f"{path} has schema_version {version}, this nmoe-data reads {SCHEMA_VERSION}",
            "use the version of nmoe-data that wrote it",
        )
    return _parse(content, path)


def _parse(content: dict[str, Any], path: Path) -> Manifest:
    try:
        known = {field.name: content[field.name] for field in fields(Manifest)}
        known["shards"] = [ShardInfo(**shard) for shard in known["shards"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            "E-MANIFEST-INVALID", f"{path} lacks or misnames a field ({error})", REDO
        ) from error
    return Manifest(**known)


def npy_header(dtype: np.dtype[Any], rows: int) -> bytes:
    """Returns the header of a one-dimensional `.npy`; its size does not depend on `rows`."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    # NumPy pads the header so that the first axis can grow in place.
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": (rows,)}
    )
    return header.getvalue()


def map_shard(path: Path, dtype: np.dtype[Any], rows: int) -> npt.NDArray[Any]:
    """Memory-maps a one-dimensional `.npy` whose header and size are exactly what is expected.

    Raises DataError: E-SHARD-MISSING or E-SHARD-LAYOUT, or those of `os_errors` if it cannot be
    read, naming the file.
    """
    expected = npy_header(dtype, rows)
    size = len(expected) + rows * dtype.itemsize
    with os_errors("read", path):
        if not path.is_file():
            raise DataError("E-SHARD-MISSING", f"{path} is not there", REDO)
        with path.open("rb") as file:
            header = file.read(len(expected))
        if header != expected or path.stat().st_size != size:
            raise DataError(
                "E-SHARD-LAYOUT",
                f"{path} is not a .npy file of {rows} rows of {dtype} in {size} bytes",
                REDO,
            )
        return np.memmap(path, dtype, mode="r", offset=len(expected), shape=(rows,))


def map_dataset(
    folder: Path, manifest: Manifest
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Memory-maps the tokens and the index of every shard, each as the manifest describes it.

    Raises DataError: those of `map_shard`.
    """
    dtype = token_dtype(manifest.tokenizer["vocab_size"])
    return [
        (
            map_shard(folder / shard.name, dtype, shard.tokens),
            map_shard(folder / index_name(shard.name), INDEX_DTYPE, shard.documents),
        )
        for shard in manifest.shards
    ]
