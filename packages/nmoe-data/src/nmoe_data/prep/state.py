"""How far an unfinished run is: `state.json`, and the checks before it is trusted.

The state names rows and bytes that are already durable, so whatever a killed run wrote after it is
cut off and made again, the same.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write
from nmoe_data.shards.writer import WriterState
from nmoe_data.sources import Cursor, place_of

STATE_NAME = "state.json"
STATE_VERSION = 1


@dataclass(slots=True)
class Counts:
    """What became of the records read so far, over both splits."""

    records_in: int = 0
    documents_out: int = 0
    text_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary with the reasons sorted."""
        return {**asdict(self), "rejected": dict(sorted(self.rejected.items()))}


@dataclass(slots=True)
class RunState:
    """Everything a run needs to go on from its last checkpoint."""

    arguments: dict[str, Any]
    command: str
    tokenizer_hash: str
    cursor: Cursor = field(default_factory=Cursor)
    sources: list[dict[str, Any]] = field(default_factory=list)
    writers: dict[str, WriterState] = field(default_factory=dict)
    rejected_bytes: int = 0
    counts: Counts = field(default_factory=Counts)
    first_document: int | None = None


def write_state(out: Path, state: RunState) -> None:
    """Writes `out`/state.json atomically."""
    content = {
        "schema_version": STATE_VERSION,
        "arguments": state.arguments,
        "command": state.command,
        "tokenizer_hash": state.tokenizer_hash,
        "cursor": asdict(state.cursor),
        "sources": state.sources,
        "writers": {split: writer.to_json() for split, writer in state.writers.items()},
        "rejected_bytes": state.rejected_bytes,
        "counts": state.counts.to_json(),
        "first_document": state.first_document,
    }
    atomic_write(out / STATE_NAME, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def read_state(out: Path) -> RunState | None:
    """Returns the state of an unfinished run in `out`, or None if there is none.

    Raises DataError: E-RESUME-STATE if the file cannot be understood.
    """
    path = out / STATE_NAME
    if not path.is_file():
        return None
    try:
        return _parse(orjson.loads(path.read_bytes()))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            "E-RESUME-STATE",
            f"{path} cannot be understood ({error!r})",
            "remove the output folder and start again",
        ) from error


def _parse(content: dict[str, Any]) -> RunState:
    if content["schema_version"] != STATE_VERSION:
        raise KeyError(f"schema_version {content['schema_version']}")
    writers = content["writers"].items()
    return RunState(
        arguments=content["arguments"],
        command=content["command"],
        tokenizer_hash=content["tokenizer_hash"],
        cursor=Cursor(**content["cursor"]),
        sources=content["sources"],
        writers={split: WriterState.from_json(writer) for split, writer in writers},
        rejected_bytes=content["rejected_bytes"],
        counts=Counts(**content["counts"]),
        first_document=content["first_document"],
    )


def check_same_arguments(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises E-OUT-DIFFERS, saying what differs, unless both runs have the same arguments.

    Where it is the files of the sources alone, the code is E-SOURCE-CHANGED.

    Sources are the same if they name the same places, however they were typed.
    """
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if not _same(name, old.get(name), new.get(name))
    ]
    if names == ["source_files"]:
        raise DataError(
            "E-SOURCE-CHANGED",
            f"the source files of {out} have changed in name, number or size",
            "restore them, or write to another folder",
        )
    if names:
        different = (_describe_difference(name, old.get(name), new.get(name)) for name in names)
        raise DataError(
            "E-OUT-DIFFERS",
            f"{out} was begun with other arguments ({'; '.join(different)})",
            "give the arguments it was begun with, or another folder",
        )


def _same(name: str, old: Any, new: Any) -> bool:
    if name == "sources" and isinstance(old, list):
        return [place_of(source) for source in old] == [place_of(source) for source in new]
    return bool(old == new)


def _describe_difference(name: str, old: object, new: object) -> str:
    if name == "source_files":
        return "the source-files changed in name, number or size"
    return f"{name.replace('_', '-')} {old!r} became {new!r}"
