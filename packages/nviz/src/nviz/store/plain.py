"""Opens the files of runs, which are not trusted: plain files alone, and none through a link.

A link could lead out of the runs' root, and a pipe or a device would hold its reader for ever.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

# Without O_NONBLOCK the opening of a pipe would wait for its writer. Windows has no such flags.
FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


def is_plain(path: Path) -> bool:
    """Whether `path` is a plain file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_plain(path: Path) -> BinaryIO:
    """A plain file, opened to read bytes.

    Raises FileNotFoundError, or OSError if it cannot be read or is anything but a plain file.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("a link or no plain file, which is not read")
    # Should it become a link or a pipe now, it is not followed or waited for either.
    file = os.fdopen(os.open(path, FLAGS), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("a link or no plain file, which is not read")
    return file


def read_plain(path: Path, most_bytes: int) -> bytes | None:
    """The content of a plain file, or None if it holds more than `most_bytes`.

    Raises OSError as `open_plain` does.
    """
    with open_plain(path) as file:
        content = file.read(most_bytes + 1)
    return content if len(content) <= most_bytes else None
