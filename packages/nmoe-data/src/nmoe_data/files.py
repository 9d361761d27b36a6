"""Durable writes, hashes, a folder lock, and operating-system errors turned into clear ones.

A file appears under its final name only when its bytes are on disk: write to a temporary name in
the same folder, flush, fsync, rename, fsync of the folder. Temporary names are fixed, so a killed
run leaves nothing that the next one does not overwrite.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nmoe_data.errors import DataError

TEMPORARY_SUFFIX = ".tmp"
_BLOCK_BYTES = 1 << 20

_OS_ERRORS = {
    errno.ENOSPC: ("E-DISK-FULL", "free some space and run the same command again to go on"),
    errno.EDQUOT: ("E-DISK-FULL", "raise the quota and run the same command again to go on"),
    errno.EFBIG: ("E-DISK-FULL", "raise the file size limit and run the same command again"),
    errno.EROFS: ("E-READ-ONLY", "choose a folder that can be written"),
    errno.EACCES: ("E-PERMISSION", "change the permissions or choose another folder"),
    errno.EPERM: ("E-PERMISSION", "change the permissions or choose another folder"),
    errno.ENOTDIR: ("E-NOT-A-FOLDER", "a part of this path is a file; choose another folder"),
    errno.EEXIST: ("E-NOT-A-FOLDER", "this path is a file; choose another folder"),
    errno.ENOENT: ("E-NOT-FOUND", "check the path"),
}


@contextmanager
def os_errors_as_data_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a DataError that says what failed, where, and what to do.

    `action` is the middle of a sentence ("write the shards in").
    """
    try:
        yield
    except OSError as error:
        number = error.errno if error.errno is not None else 0
        code, remedy = _OS_ERRORS.get(number, ("E-IO", "check the disk and try again"))
        where = error.filename or path
        reason = error.strerror or str(error)
        raise DataError(code, f"cannot {action} {where}: {reason}", remedy) from error


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, whose `write` may take only a part."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def atomic_write(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that readers see the old bytes or the new ones, never a mixture.

    Raises:
        OSError: as the operating system reports it; `path` is then unchanged.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with temporary.open("wb", buffering=0) as file:
        write_all(file, data)
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` itself; it ends with the process and leaves no file behind.

    Raises:
        DataError: E-OUT-BUSY if another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            "E-OUT-BUSY",
            f"another process is writing to {folder}",
            "wait for it or choose another folder",
        ) from None
    except OSError:
        # Some network file systems cannot lock a folder; the lock only guards against slips.
        return
