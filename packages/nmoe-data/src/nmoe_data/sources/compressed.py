"""Byte streams of plain, gzip and zstandard files that refuse to end early.

A compressed file cut at a line end looks complete to most readers. Here the end of the file inside
a frame raises EOFError; several frames after one another are one stream.
"""

import gzip
import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

CHUNK_BYTES = 1 << 17
# The largest window that `zstd --long=31` writes.
LARGEST_WINDOW = 1 << 31


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of decompressed bytes, and the file on disk that it comes from."""

    data: BinaryIO
    raw: BinaryIO

    def close(self) -> None:
        """Closes both."""
        self.data.close()
        self.raw.close()


class _ZstandardReader(io.RawIOBase):
    """Decompresses frame after frame; raises EOFError if the file ends inside one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._inside = False
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # typeshed's Buffer needs 3.12
        while not self._output:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _fill(self) -> bool:
        data = self._input or self._raw.read(CHUNK_BYTES)
        if not data:
            if self._inside:
                raise EOFError("the file ends inside a zstandard frame")
            return False
        self._inside = True
        self._output = memoryview(self._frame.decompress(data))
        self._input = b""
        if self._frame.eof:
            self._input = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()
            self._inside = False
        return True


def open_stream(path: Path) -> Stream:
    """Opens a file for reading as decompressed bytes, by its last extension (.gz, .zst or plain).

    Reading raises EOFError for a file cut inside a frame, `zlib.error`, `gzip.BadGzipFile` or
    `zstandard.ZstdError` for a damaged one.
    """
    raw = path.open("rb", buffering=CHUNK_BYTES)
    if path.suffix == ".gz":
        return Stream(cast(BinaryIO, gzip.GzipFile(fileobj=raw)), raw)
    if path.suffix == ".zst":
        return Stream(io.BufferedReader(_ZstandardReader(raw), CHUNK_BYTES), raw)
    return Stream(raw, raw)
