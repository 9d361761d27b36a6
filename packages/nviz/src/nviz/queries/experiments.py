"""Configurations side by side: which settings differ between runs, and which are equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nviz.queries.configuration import flatten

# Settings that name a run and change nothing in it.
NAMES = frozenset({"run.name", "run.dir", "run.tags", "run.group"})


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value in each run, in the runs' order; None where a run has no such setting."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether some two runs have other values."""
        return len(set(self.values)) > 1


def settings(configs: Sequence[dict[str, Any]]) -> list[Setting]:
    """Every setting of any run but `NAMES`: those that differ first, then by name."""
    flat = [dict(flatten(config)) for config in configs]
    names = {name for config in flat for name in config} - NAMES
    found = [Setting(name, tuple(config.get(name) for config in flat)) for name in names]
    return sorted(found, key=lambda item: (not item.differs, item.name))
