"""Finds the folders that nmoe-data's judge pipeline writes, and reads them: labels, heads, filtered
corpora, reports.

A folder is known by a file in it (`label.json`, `head.json`, `filter.json`, `report.json`), at the
root itself or one to three levels below it. JSON is read again only when the file changed. Pages
look folders up by their keys, so no address reaches outside the root. Nothing here raises for what
a file holds: a folder that cannot be read says why.
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nviz.store.parse import parse_json
from nviz.store.plain import read_plain
from nviz.store.runs import (
    DEPTH,
    LARGEST_RUN_JSON_BYTES,
    Signature,
    key_below,
    signature,
)

KINDS = {
    "labels": "label.json",
    "heads": "head.json",
    "filter": "filter.json",
    "report": "report.json",
}
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class HydraFolder:
    """One folder: its key (the path below the root), its kind (see `KINDS`), its JSON.

    problem: why it cannot be shown, or None. written_unix_s: when its JSON was last written.
    """

    key: str
    kind: str
    folder: Path
    written_unix_s: float
    content: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


class HydraIndex:
    """The folders under `root`, kept fresh by `refresh`. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._seen: dict[Path, tuple[Signature, HydraFolder]] = {}

    def refresh(self) -> dict[str, HydraFolder]:
        """Folders by key, the newest first."""
        with self._lock:
            found = [self._read(path, kind) for path, kind in _find(self.root)]
            self._seen = {
                item.folder: self._seen[item.folder] for item in found if item.folder in self._seen
            }
        found.sort(key=lambda item: (item.written_unix_s, item.key), reverse=True)
        return {item.key: item for item in found}

    def _read(self, folder: Path, kind: str) -> HydraFolder:
        path = folder / KINDS[kind]
        seen = signature(path)
        known = self._seen.get(folder)
        if known and known[0] == seen:
            return known[1]
        key = key_below(self.root, folder)
        written = seen[0] / 1e9 if seen else 0.0
        content, problem = _content(path)
        item = HydraFolder(key, kind, folder, written, content, problem)
        if seen:
            self._seen[folder] = (seen, item)
        return item


def _find(root: Path) -> Iterator[tuple[Path, str]]:
    kind = _kind(root)
    if kind:
        yield root, kind
    else:
        yield from _search(root, root.resolve(), DEPTH)


def _kind(folder: Path) -> str | None:
    return next((kind for kind, name in KINDS.items() if (folder / name).is_file()), None)


def _search(folder: Path, root: Path, depth: int) -> Iterator[tuple[Path, str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        if entry.is_symlink() and not path.resolve().is_relative_to(root):
            continue
        kind = _kind(path)
        if kind:
            yield path, kind
        elif depth > 1:
            yield from _search(path, root, depth - 1)


def _content(path: Path) -> tuple[dict[str, Any], str | None]:
    """The JSON object in a file and None, or {} and why there is none."""
    try:
        content = read_plain(path, LARGEST_RUN_JSON_BYTES)
        if content is None:
            return {}, f"{path.name} is larger than 16 MiB"
        value = parse_json(content)
    except OSError as error:
        return {}, f"{path.name}: {error.strerror or error}"
    except ValueError:
        return {}, f"{path.name} is no whole JSON (is it being written?)"
    if not isinstance(value, dict):
        return {}, f"{path.name} holds no JSON object"
    if value.get("schema_version") != SCHEMA_VERSION:
        version = value.get("schema_version")
        return {}, f"{path.name} has schema_version {version!r}, this nviz reads {SCHEMA_VERSION}"
    return value, None
