"""A nested configuration as a flat table."""

import json
from typing import Any


def flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted name and value of every leaf, sorted by name; lists and odd leaves as JSON."""
    rows: list[tuple[str, str]] = []
    pending: list[tuple[str, Any]] = [(prefix, config)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict) and value:
            pending += [
                (f"{name}.{key}" if name else str(key), item) for key, item in value.items()
            ]
        elif name:
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))
    return sorted(rows)


def search(rows: list[tuple[str, str]], words: str) -> list[tuple[str, str]]:
    """Rows whose name or value holds every word of `words`, case ignored."""
    wanted = words.lower().split()
    return [row for row in rows if all(word in f"{row[0]} {row[1]}".lower() for word in wanted)]
