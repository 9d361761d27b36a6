"""From what the user names (a folder, a file, `python-stdlib`) to the files to read, in order.

Files come sorted by their path below the root, so the order is the same on every machine. Hidden
files and folders are left out; every other file of a folder is listed, and one that nothing reads
becomes a rejection.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors_as_data_errors
from nmoe_data.sources.jsonl import read_json, read_jsonl
from nmoe_data.sources.parquet import read_parquet
from nmoe_data.sources.record import Reader
from nmoe_data.sources.text import read_text, read_unsupported

PYTHON_STDLIB = "python-stdlib"

_TEXT_EXTENSIONS = """
adoc asm bash bat c cc cfg clj cmake conf cpp cs css csv cu cuh cxx dart diff el erl ex exs f90
fs go gradle graphql groovy h hpp hs htm html ini ipynb java jl js jsx kt lean less lisp lua m
md mdx ml mli nim nix patch php pl pm proto ps1 py pyi pyx r rb rs rst sass scala scm scss sh
sql srt svg swift tcl tex text toml ts tsv tsx txt v vb vhdl vue wat xml yaml yml zig
"""
_TEXT_NAMES = frozenset({"dockerfile", "makefile", "license", "licence", "readme", "copying"})
_OUTSIDE_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read.

    Attributes:
        root: what the user named.
        name: the path below the root, with forward slashes.
        path: where it is.
        size: bytes on disk.
        reader: reads its records.
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


def list_files(source: Source) -> list[SourceFile]:
    """Return the files of all sources, in the order in which they are read.

    Raises:
        DataError: E-SOURCE-MISSING or E-SOURCE-EMPTY.
    """
    specs = [source] if isinstance(source, str | Path) else list(source)
    if not specs:
        raise DataError("E-SOURCE-MISSING", "no source was named", "name a folder or a file")
    return [file for spec in specs for file in _list_one(str(spec))]


def listing_hash(files: Iterable[SourceFile]) -> str:
    """Return a hash of the files' roots, names and sizes, to notice that a source has changed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.root}\0{file.name}\0{file.size}\n".encode())
    return digest.hexdigest()


def _list_one(spec: str) -> list[SourceFile]:
    if spec == PYTHON_STDLIB:
        return _list_stdlib()
    root = Path(spec)
    if not root.exists():
        raise DataError(
            "E-SOURCE-MISSING",
            f"there is no file or folder {spec}",
            f"check the path, or name {PYTHON_STDLIB} for text that is always there",
        )
    with os_errors_as_data_errors("list", root):
        if root.is_dir():
            return _list_folder(spec, root)
        reader = _reader_of(root)
        # The user named this very file, so an unknown extension is taken as text.
        reader = read_text if reader is read_unsupported else reader
        return [SourceFile(spec, root.name, root, root.stat().st_size, reader)]


def _list_folder(spec: str, root: Path) -> list[SourceFile]:
    paths = [path for path in root.rglob("*") if path.is_file() and not _hidden(path, root)]
    if not paths:
        raise DataError(
            "E-SOURCE-EMPTY", f"the folder {spec} holds no files", "name a folder with text in it"
        )
    return _sorted_files(spec, root, paths)


def _list_stdlib() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not _OUTSIDE_STDLIB.intersection(path.relative_to(root).parts)
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
    """Return a file name that JSON can hold, even if its bytes are no UTF-8."""
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
        path.suffix.lower().removeprefix(".") in _TEXT_EXTENSIONS.split()
        or path.stem.lower() in _TEXT_NAMES
    ):
        return read_text
    return read_unsupported
