"""Orders of faults to workers: files in the run folder, a file an order."""

import contextlib
import json
from pathlib import Path
from typing import Any

from nmoe_data.files import atomic_write

from nmoe_train.config import Config


def order(folder: Path, slot: int, number: int, **fields: Any) -> None:
    """Orders a fault of the worker at a slot; its `number` is unlike all others."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{slot}-{number}.json", json.dumps(fields).encode())


def orders_of(config: Config) -> Path:
    """Where a run's orders are."""
    return config.run.dir / "drill"


class Orders:
    """The orders to the worker at a slot, for any thread of it."""

    def __init__(self, folder: Path, slot: int) -> None:
        self._folder, self._slot = folder, slot

    def waiting(self) -> list[tuple[Path, dict[str, Any]]]:
        """Those that nobody has taken yet, with their files."""
        found = []
        for path in sorted(self._folder.glob(f"{self._slot}-*.json")):
            # Another thread may take it, or a process of the same slot that is about to end.
            with contextlib.suppress(FileNotFoundError):
                found.append((path, json.loads(path.read_bytes())))
        return found

    def take(self, kind: str) -> dict[str, Any] | None:
        """The next order of a kind, which nobody else gets."""
        for path, told in self.waiting():
            if told["kind"] == kind and _removed(path):
                return told
        return None


def _removed(path: Path) -> bool:
    """Removes a file; whether it was this call that did."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
