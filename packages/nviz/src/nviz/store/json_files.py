"""JSON files that carry a `schema_version`: read whole, or said why not."""

from pathlib import Path
from typing import Any

from nviz.store.parse import parse_json
from nviz.store.plain import read_plain

SCHEMA_VERSION = 1


def parse_object(content: bytes, name: str) -> tuple[dict[str, Any], str | None]:
    """The JSON object in `content`, of the file `name`, and None; or {} and why there is none."""
    try:
        value = parse_json(content)
    except ValueError:
        return {}, f"{name} is no whole JSON (is it being written?)"
    if not isinstance(value, dict):
        return {}, f"{name} holds no JSON object"
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        what = f"{name} has schema_version {version!r:.40}, this nviz reads {SCHEMA_VERSION}"
        return {}, what
    return value, None


def read_object(path: Path, most_bytes: int) -> tuple[dict[str, Any], str | None]:
    """As `parse_object`, of a file; {} and why for one that cannot be read or is too large."""
    try:
        content = read_plain(path, most_bytes)
    except OSError as error:
        return {}, f"{path.name}: {error.strerror or error}"
    if content is None:
        return {}, f"{path.name} is larger than {most_bytes // 2**20} MiB"
    return parse_object(content, path.name)
