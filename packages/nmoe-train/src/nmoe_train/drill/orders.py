"""Orders of faults to workers: files in the run folder, a file an order."""

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
