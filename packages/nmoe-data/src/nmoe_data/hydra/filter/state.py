"""`filter.json`: settings, counts, and while a run is unfinished how far it is.

The state names parts that are durable and the first chunk behind them. Chunks behind that one that
are already done lie in files of their own, so a killed run does only those again that were in work.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write
from nmoe_data.hydra.filter.result import SUMMARY_NAME
from nmoe_data.sources import place_of

SCHEMA_VERSION = 1


@dataclass(slots=True)
class Counts:
    """What became of the records up to the last whole part.

    decided: documents by "decided_by decision" ("probe drop"). domains: documents and kept ones by
    domain. rejected: by reason. text_bytes, kept_bytes: UTF-8.
    """

    documents: int = 0
    kept: int = 0
    text_bytes: int = 0
    kept_bytes: int = 0
    decided: dict[str, int] = field(default_factory=dict)
    domains: dict[str, dict[str, int]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Place:
    """Where a run goes on: the first chunk that no part holds, and what the files hold before it.

    known: see `Schedule`. parts: whole ones. rejected_bytes: of rejected.jsonl. bytes_done: of the
    sources on disk.
    """

    unit: int = 0
    index: int = 0
    known: int = 0
    parts: int = 0
    rejected_bytes: int = 0
    bytes_done: int = 0


@dataclass(slots=True)
class State:
    """What filter.json holds. place: None once the run is finished. llm: what the judge was asked
    in the band and what it cost, {} without one.
    """

    settings: dict[str, Any]
    heads: dict[str, Any]
    counts: Counts = field(default_factory=Counts)
    llm: dict[str, Any] = field(default_factory=dict)
    place: Place | None = field(default_factory=Place)

    @property
    def fingerprint(self) -> str:
        """What chunk files carry, so that those of other settings count for nothing."""
        return hashlib.sha256(orjson.dumps(self.settings, option=orjson.OPT_SORT_KEYS)).hexdigest()


def write_state(out: Path, state: State) -> dict[str, Any]:
    """Writes filter.json atomically and returns its content as it reads back."""
    counts = asdict(state.counts)
    for name in ("decided", "domains", "rejected"):
        counts[name] = dict(sorted(counts[name].items()))
    documents = max(state.counts.documents, 1)
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": state.settings,
        "heads": state.heads,
        "counts": counts,
        "rates": {
            "kept": state.counts.kept / documents,
            "kept_bytes": state.counts.kept_bytes / max(state.counts.text_bytes, 1),
            "spared_by_probe": state.counts.decided.get("probe drop", 0) / documents,
        },
        "llm": state.llm,
    }
    if state.place is not None:
        content["state"] = asdict(state.place)
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    atomic_write(out / SUMMARY_NAME, data)
    return dict(orjson.loads(data))


def read_state(out: Path) -> State | None:
    """Returns what filter.json holds, None if there is none.

    Raises DataError: E-HYDRA-RESUME if it cannot be understood.
    """
    path = out / SUMMARY_NAME
    if not path.is_file():
        return None
    try:
        content = orjson.loads(path.read_bytes())
        if content["schema_version"] != SCHEMA_VERSION:
            raise KeyError(f"schema_version {content['schema_version']}")
        place = content.get("state")
        return State(
            settings=content["settings"],
            heads=content["heads"],
            counts=Counts(**content["counts"]),
            llm=content["llm"],
            place=None if place is None else Place(**place),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            "E-HYDRA-RESUME",
            f"{path} cannot be understood ({error!r})",
            "remove the output folder and start again",
        ) from error


def check_same_settings(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises E-HYDRA-RESUME, saying what differs, unless both runs have the same settings.

    Sources are the same if they name the same places, however they were typed.
    """
    names = sorted(old.keys() | new.keys())
    different = [name for name in names if not _same(name, old.get(name), new.get(name))]
    if not different:
        return
    what = "; ".join(_describe(name, old.get(name), new.get(name)) for name in different)
    raise DataError(
        "E-HYDRA-RESUME",
        f"{out} was begun with other settings ({what})",
        "give those it was begun with, or another folder",
    )


def _same(name: str, old: Any, new: Any) -> bool:
    if name == "sources" and isinstance(old, list) and isinstance(new, list):
        return [place_of(source) for source in old] == [place_of(source) for source in new]
    return bool(old == new)


def _describe(name: str, old: object, new: object) -> str:
    if name == "source_files":
        return "the source files changed in name, number or size"
    if name == "heads":
        return f"the heads {str(old)[:16]} became {str(new)[:16]}"
    return f"{name.replace('_', '-')} {old!r} became {new!r}"
