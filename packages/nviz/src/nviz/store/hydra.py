"""Finds the folders that nmoe-data's judge pipeline writes, and reads them: labels, heads, filtered
corpora, reports.

A folder is known by a file in it (`label.json`, `head.json`, `filter.json`, `report.json`), at the
root itself or one to three levels below it. JSON is read again only when the file changed. Pages
look folders up by their keys, so no address reaches outside the root. Nothing here raises for what
a file holds: a folder that cannot be read says why.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nviz.store.folders import key_below, search
from nviz.store.json_files import read_object
from nviz.store.runs import LARGEST_RUN_JSON_BYTES, Signature, signature

KINDS = {
    "labels": "label.json",
    "heads": "head.json",
    "filter": "filter.json",
    "report": "report.json",
}


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
            places = search(self.root, lambda folder: _kind(folder) is not None)
            found = [self._read(path, kind) for path in places if (kind := _kind(path))]
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
        content, problem = read_object(path, LARGEST_RUN_JSON_BYTES)
        item = HydraFolder(key, kind, folder, written, content, problem)
        if seen:
            self._seen[folder] = (seen, item)
        return item


def _kind(folder: Path) -> str | None:
    return next((kind for kind, name in KINDS.items() if (folder / name).is_file()), None)
