"""Looks for folders below the runs' root, which is not trusted.

Hidden folders are passed over, and so are links that lead out of the root.
"""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

DEPTH = 3


def key_below(root: Path, folder: Path) -> str:
    """The key of a folder: its path below the root, or the root's own name.

    Bytes that are no UTF-8 are written as `\\xff`, as neither a page nor SQL could show them.
    """
    name = folder.resolve().name if folder == root else folder.relative_to(root).as_posix()
    return os.fsencode(name).decode(errors="backslashreplace")


def folders_in(folder: Path, inside: Path, without: Collection[str] = ()) -> list[Path]:
    """Folders in `folder` by name, without those that lead out of `inside`, a resolved path.

    Those of a name in `without` are left out. Empty where `folder` cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if _leads_to_folder(entry, inside)]
    except OSError:
        return []
    names = sorted(entry.name for entry in found if entry.name not in without)
    return [folder / name for name in names]


def _leads_to_folder(entry: os.DirEntry[str], inside: Path) -> bool:
    if entry.name.startswith("."):
        return False
    try:
        if not entry.is_dir():
            return False
        return not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(inside)
    except (OSError, RuntimeError):
        # A link that leads to itself.
        return False


def search(
    root: Path,
    wanted: Callable[[Path], bool],
    without: Callable[[Path], Collection[str]] = lambda _: (),
) -> Iterator[Path]:
    """Folders at `root` and up to `DEPTH` levels below it that are `wanted`; what lies below such
    a folder is not searched. `without` gives the names in a folder that are not searched either.
    """
    yield from _search(root, root.resolve(), DEPTH, wanted, without)


def _search(
    folder: Path,
    inside: Path,
    depth: int,
    wanted: Callable[[Path], bool],
    without: Callable[[Path], Collection[str]],
) -> Iterator[Path]:
    if wanted(folder):
        yield folder
    elif depth > 0:
        for path in folders_in(folder, inside, without(folder)):
            yield from _search(path, inside, depth - 1, wanted, without)
