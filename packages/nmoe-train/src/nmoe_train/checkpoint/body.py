"""A rank's file of a checkpoint: safetensors, written from host memory in large pieces.

The format is a length (8 bytes, little-endian), a JSON header of names, types, shapes and places,
and the tensors' bytes without gaps, the widest types first, so that each starts aligned. It is
written here, not by the library, which copies every tensor once more: the bytes go from the
snapshot to the disk in pieces that other threads can run beside, and one of these hashes them.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe_train.checkpoint.direct import DirectWriter, sha256_from_disk

CHUNK_BYTES = 4 << 20
ALIGNMENT = 8
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Body:
    """Tensors of the host as a safetensors file. `limit`: bytes a second; None for no limit."""

    def __init__(self, tensors: Mapping[str, Tensor], limit: float | None = None) -> None:
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._tensors = {name: tensors[name] for name in order}
        self._limit = limit
        self.sha256 = ""
        """Of what was written, once it is."""

    def write(self, path: Path) -> None:
        """Writes a new file and makes it durable. Raises OSError, also where there is one."""
        digest, began_s, written = hashlib.sha256(), time.monotonic(), 0
        size = sum(len(part) for part in self._parts())
        with (
            ThreadPoolExecutor(1, "hash") as beside,
            contextlib.closing(DirectWriter(path, CHUNK_BYTES, size)) as file,
        ):
            for chunk in self._chunks():
                hashed = beside.submit(digest.update, chunk)
                file.write(chunk)
                hashed.result()
                written += len(chunk)
                if self._limit is not None:
                    time.sleep(max(0.0, began_s + written / self._limit - time.monotonic()))
            file.sync()
        self.sha256 = digest.hexdigest()

    def is_on_disk(self, path: Path) -> bool:
        """Whether a file that is read back is what was written. Raises OSError."""
        return sha256_from_disk(path, CHUNK_BYTES) == self.sha256

    def _chunks(self) -> Iterator[memoryview]:
        """All bytes, in pieces of `CHUNK_BYTES` but for the last."""
        gathered = bytearray()
        for part in self._parts():
            while len(part):
                room = CHUNK_BYTES - len(gathered)
                if not gathered and len(part) >= room:
                    yield part[:room]
                else:
                    gathered += part[:room]
                part = part[room:]
                if len(gathered) == CHUNK_BYTES:
                    yield memoryview(gathered)
                    gathered = bytearray()
        if gathered:
            yield memoryview(gathered)

    def _parts(self) -> Iterator[memoryview]:
        yield memoryview(self._header())
        for tensor in self._tensors.values():
            array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)

    def _header(self) -> bytes:
        places, at = {}, 0
        for name, tensor in self._tensors.items():
            end = at + tensor.numel() * tensor.element_size()
            kind = DTYPE_NAMES[tensor.dtype]
            places[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        header = json.dumps(places, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        return len(header).to_bytes(8, "little") + header
