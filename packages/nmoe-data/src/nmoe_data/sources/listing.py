"""From what the user names (a folder, a file, `python-stdlib`) to the files to read, in order.

Files come sorted by their path below the root, so the order is the same on every machine. Hidden
files and folders are left out; every other file of a folder is listed, and one that nothing reads
becomes a rejection.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors
from nmoe_data.sources.jsonl import read_json, read_jsonl
from nmoe_data.sources.parquet import read_parquet
from nmoe_data.sources.record import Reader
from nmoe_data.sources.text import read_text, read_unsupported

PYTHON_STDLIB = "python-stdlib"

TEXT_EXTENSIONS = """
adoc asm bash bat c cc cfg clj cmake conf cpp cs css csv cu cuh cxx dart diff el erl ex exs f90
fs go gradle graphql groovy h hpp hs htm html ini ipynb java jl js jsx kt lean less lisp lua m
md mdx ml mli nim nix patch php pl pm proto ps1 py pyi pyx r rb rs rst sass scala scm scss sh
sql srt svg swift tcl tex text toml ts tsv tsx txt v vb vhdl vue wat xml yaml yml zig
"""
TEXT_NAMES = frozenset({"dockerfile", "makefile", "license", "licence", "readme", "copying"})
OUTSIDE_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read.

    root: what the user named. name: the path below the root, with forward slashes. path: where it
    is. size: bytes on disk. reader: reads its records.
    """

    root: str
    name: str
    path: Path
    size: int
    reader: Reader

    @property
    def supported(self) -> bool:
        """Whether anything reads this kind of file."""
        return self.reader is not read_unsupported


Source = str | Path | Sequence[str | Path]


def source_list(source: Source) -> list[str]:
    """Returns the sources one by one, as they were typed."""
    return [str(spec) for spec in ([source] if isinstance(source, str | Path) else source)]


def place_of(spec: str) -> str:
    """Returns what is the same for two ways of typing one source: its absolute path, or the word.

    Links are not followed.
    """
    return spec if spec == PYTHON_STDLIB else os.path.normpath(Path(spec).absolute())


def list_files(source: Source, exclude: Sequence[Path] = ()) -> list[SourceFile]:
    """Returns the files of all sources, in the order in which they are read.

    exclude: folders (or files) that are left out where they lie below a source, or are one; a
    source that is named inside one of them is read.
    Raises DataError: E-SOURCE-MISSING, E-SOURCE-KIND or E-SOURCE-EMPTY, or those of `os_errors` for
    a folder that cannot be listed.
    """
    specs = source_list(source)
    if not specs:
        raise DataError("E-SOURCE-MISSING", "no source was named", "name a folder or a file")
    return [file for spec in specs for file in _list_one(spec, exclude)]


def listing_hash(files: Iterable[SourceFile]) -> str:
    """Returns a hash of the files' names and sizes, source by source, to notice a change.

    How the sources were typed, and where they lie, does not count.
    """
    digest = hashlib.sha256()
    for number, (_, group) in enumerate(groupby(files, key=lambda file: file.root)):
        for file in group:
            digest.update(f"{number}\0{file.name}\0{file.size}\n".encode())
    return digest.hexdigest()


def _list_one(spec: str, exclude: Sequence[Path]) -> list[SourceFile]:
    if spec == PYTHON_STDLIB:
        return _list_stdlib()
    root = Path(spec)
    with os_errors("list", root):
        if root.exists() and not (root.is_file() or root.is_dir()):
            raise DataError(
                "E-SOURCE-KIND", f"{spec} is a device or a pipe", "name a folder or a regular file"
            )
        if not root.exists():
            raise DataError(
                "E-SOURCE-MISSING",
                f"there is no file or folder {spec}",
                f"check the path, or name {PYTHON_STDLIB} for text that is always there",
            )
        if root.is_dir():
            return _list_folder(spec, root, exclude)
        reader = _reader_of(root)
        # The user named this very file, so an unknown extension is taken as text.
        reader = read_text if reader is read_unsupported else reader
        return [SourceFile(spec, root.name, root, root.stat().st_size, reader)]


def _list_folder(spec: str, root: Path, exclude: Sequence[Path]) -> list[SourceFile]:
    left_out = _inside(root, exclude)
    paths = [
        path
        for path in root.rglob("*")
        if path.is_file() and not _hidden(path, root) and not left_out(path)
    ]
    if not paths:
        what = f"the folder {spec} holds no files" + (" but those left out" if exclude else "")
        raise DataError("E-SOURCE-EMPTY", what, "name a folder with text in it")
    return _sorted_files(spec, root, paths)


def _inside(root: Path, exclude: Sequence[Path]) -> Callable[[Path], bool]:
    """Returns a test whether a path below `root` lies in one of `exclude`, links followed."""
    real_root = root.resolve()
    folders = [path.resolve() for path in exclude]
    below = [
        folder.relative_to(real_root) for folder in folders if folder.is_relative_to(real_root)
    ]
    return lambda path: any(path.relative_to(root).is_relative_to(folder) for folder in below)


def _list_stdlib() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not OUTSIDE_STDLIB.intersection(path.relative_to(root).parts)
    ]
    if not paths:
        raise DataError(
            "E-SOURCE-EMPTY",
            "this Python keeps no sources of its standard library on disk",
            "name a folder of text instead",
        )
    return _sorted_files(PYTHON_STDLIB, root, paths)


def _sorted_files(spec: str, root: Path, paths: Iterable[Path]) -> list[SourceFile]:
    files = [
        SourceFile(
            spec,
            _printable(path.relative_to(root).as_posix()),
            path,
            path.stat().st_size,
            _reader_of(path),
        )
        for path in paths
    ]
    return sorted(files, key=lambda file: file.name)


def _printable(name: str) -> str:
    """Returns a file name that JSON can hold, even if its bytes are no UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _reader_of(path: Path) -> Reader:
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")):
        return read_jsonl
    if name.endswith(".json"):
        return read_json
    if name.endswith(".parquet"):
        return read_parquet
    if (
        path.suffix.lower().removeprefix(".") in TEXT_EXTENSIONS.split()
        or path.stem.lower() in TEXT_NAMES
    ):
        return read_text
    return read_unsupported
