"""Durable writes: a reader sees the old content or the new one, whatever dies in between.

Every file of a run folder is written to a temporary name beside its final one, flushed to the disk,
renamed, and the folder flushed, so that a crash at any instant leaves a whole file.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nmoe_train.errors import TrainError


def fsync_path(path: Path) -> None:
    """Flushes a closed file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Replaces `path` by what `write` puts into the stream it is given, durably and at once.

    Raises OSError as the file system does; `path` then still has its old content.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`, durably and at once."""

    def write(stream: BinaryIO) -> None:
        stream.write(content)

    write_atomic(path, write)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def disk_errors(what: str, where: Path) -> Iterator[None]:
    """Turns a full, read-only or forbidden disk into one clear TrainError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise TrainError(
                "E-NO-SPACE",
                f"no space left while {what} under {where} ({os.strerror(error.errno)})",
                "free some space and start the same command again; it goes on from the last "
                "complete checkpoint",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise TrainError(
                "E-RUN-FOLDER",
                f"cannot write while {what} under {where} ({os.strerror(error.errno)})",
                "choose a folder that you may write to",
            ) from error
        raise
