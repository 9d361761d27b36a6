"""Rubrics: what a judge scores from 0 to 5, with words for each score, from a TOML file.

A rubric is identified by the hash of its meaning: names, descriptions, anchors, instructions.
Comments and layout of the file do not count. Two rubrics are bundled, `prose` and `code`.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors

BUNDLED = ("prose", "code")
MAX_SCORE = 5
MAX_DIMENSIONS = 16
REASON_FIELD = "reason"
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One thing that is scored.

    name: lower case, a field of the reply. description: one sentence. anchors: what each score
    from 0 to 5 means, 6 texts.
    """

    name: str
    description: str
    anchors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rubric:
    """What a judge is asked.

    dimensions: 1 to 16, in the order of every list of scores. instructions: what the judge is told
    before them. hash: SHA-256 of the meaning, hex. toml: the file, byte for byte.
    """

    name: str
    dimensions: tuple[Dimension, ...]
    instructions: str
    hash: str
    toml: bytes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions, in order."""
        return tuple(dimension.name for dimension in self.dimensions)


def load_rubric(name_or_path: str | Path) -> Rubric:
    """Returns a bundled rubric (`prose`, `code`) or the one in a TOML file.

    Raises DataError: E-HYDRA-RUBRIC if there is none or it does not have the form of one, those of
    `os_errors` if the file cannot be read.
    """
    if str(name_or_path) in BUNDLED:
        file = resources.files("nmoe_data.hydra") / "rubrics" / f"{name_or_path}.toml"
        return parse_rubric(file.read_bytes(), str(name_or_path))
    path = Path(name_or_path)
    with os_errors("read", path):
        if not path.is_file():
            raise DataError(
                "E-HYDRA-RUBRIC",
                f"there is no rubric {name_or_path}",
                f"give the path of a TOML file, or one of {', '.join(BUNDLED)}",
            )
        return parse_rubric(path.read_bytes(), str(path))


def parse_rubric(toml: bytes, where: str) -> Rubric:
    """Returns the rubric in the bytes of a TOML file; `where` names it in errors.

    Raises DataError: E-HYDRA-RUBRIC.
    """
    try:
        content = tomllib.loads(toml.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _problem(where, f"is no TOML: {error}") from None
    _check_fields(where, content, {"name", "instructions", "dimensions"})
    entries = content["dimensions"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_DIMENSIONS:
        raise _problem(where, f"needs 1 to {MAX_DIMENSIONS} [[dimensions]]")
    dimensions = tuple(_dimension(where, entry) for entry in entries)
    names = [dimension.name for dimension in dimensions]
    if len(set(names)) < len(names):
        raise _problem(where, f"names a dimension twice ({', '.join(names)})")
    name = _text(where, content, "name")
    instructions = _text(where, content, "instructions")
    return Rubric(name, dimensions, instructions, _hash(name, instructions, dimensions), toml)


def _dimension(where: str, entry: Any) -> Dimension:
    if not isinstance(entry, dict):
        raise _problem(where, "has a dimension that is no table")
    _check_fields(where, entry, {"name", "description", "anchors"})
    name = _text(where, entry, "name")
    if not NAME_PATTERN.fullmatch(name) or name == REASON_FIELD:
        what = f"names a dimension {name!r} (a to z, 0 to 9, _; at most 32; not {REASON_FIELD!r})"
        raise _problem(where, what)
    anchors = entry["anchors"]
    if (
        not isinstance(anchors, list)
        or len(anchors) != MAX_SCORE + 1
        or not all(isinstance(anchor, str) and anchor.strip() for anchor in anchors)
    ):
        raise _problem(where, f"needs {MAX_SCORE + 1} anchors for {name}, scores 0 to {MAX_SCORE}")
    return Dimension(name, _text(where, entry, "description"), tuple(map(str.strip, anchors)))


def _check_fields(where: str, table: dict[str, Any], wanted: set[str]) -> None:
    for field in sorted(wanted - table.keys()):
        raise _problem(where, f"has no {field!r}")
    for field in sorted(table.keys() - wanted):
        raise _problem(where, f"has an unknown {field!r}; known are {', '.join(sorted(wanted))}")


def _text(where: str, table: dict[str, Any], field: str) -> str:
    value = table[field]
    if not isinstance(value, str) or not value.strip():
        raise _problem(where, f"needs text for {field!r}")
    return value.strip()


def _problem(where: str, what: str) -> DataError:
    return DataError(
        "E-HYDRA-RUBRIC", f"the rubric {where} {what}", "mend it; a bundled one shows the form"
    )


def _hash(name: str, instructions: str, dimensions: tuple[Dimension, ...]) -> str:
    meaning = [name, instructions, [[d.name, d.description, *d.anchors] for d in dimensions]]
    return hashlib.sha256(orjson.dumps(meaning)).hexdigest()
