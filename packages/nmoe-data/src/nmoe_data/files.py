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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nmoe_data.errors import DataError

TEMPORARY_SUFFIX = ".tmp"
BLOCK_BYTES = 1 << 20

OS_ERRORS = {
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
def os_errors(action: str, path: Path) -> Iterator[None]:
    """Turns an OSError in the block into a DataError that says what failed, where, what to do.

    `action` is the middle of a sentence ("write the shards in"); `path` is named when the error
    itself names no file. Raises DataError: E-DISK-FULL, E-READ-ONLY, E-PERMISSION,
    E-NOT-A-FOLDER, E-NOT-FOUND, or E-IO for any other.
    """
    try:
        yield
    except OSError as error:
        number = error.errno if error.errno is not None else 0
        code, remedy = OS_ERRORS.get(number, ("E-IO", "check the disk and try again"))
        where = error.filename or path
        reason = error.strerror or str(error)
        raise DataError(code, f"cannot {action} {where}: {reason}", remedy) from error


def sync_path(path: Path) -> None:
    """Makes the bytes of a file, or the names in a folder, survive a power cut.

    Raises OSError as the operating system reports it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes all of `data` to an unbuffered file, whose `write` may take only a part."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def atomic_write(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that readers see the old bytes or the new ones, never a mixture.

    Raises OSError as the operating system reports it; `path` is then unchanged, and no temporary
    file stays behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder` itself; it ends with the process and leaves no file behind.

    Raises DataError: E-OUT-BUSY if another process holds it.
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
