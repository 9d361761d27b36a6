"""From a TOML file, the environment and `--set` to a checked Config, or to one clear line.

Later sources win: the file, then `NMOE_SECTION__KEY=value`, then `--set section.key=value`. Values
outside the file are read as TOML, and as plain text where they are none.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from nmoe_train.config.schema import Config, FieldProblem
from nmoe_train.errors import TrainError

ENVIRONMENT_PREFIX = "NMOE_"
SHOULD_BE = "input should be "


def load_config(
    path: Path, sets: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Config:
    """Reads a configuration file and applies the overrides of the environment and of `sets`.

    `sets` holds `section.key=value` strings. Raises TrainError (`E-CONFIG...`) with the path of
    the field and the remedy when anything is wrong.
    """
    tree = _read_toml(path)
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _override(tree, keys, value, f"environment variable {name}")
    for assignment in sets:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise TrainError(
                "E-CONFIG-SET", f"--set {assignment} has no '='", "write --set section.key=value"
            )
        _override(tree, key.strip().split("."), value.strip(), f"--set {assignment}")
    return parse_config(tree, str(path))


def parse_config(tree: Mapping[str, Any], where: str) -> Config:
    """Checks a nested mapping; `where` names its origin in errors. Raises TrainError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(_explain_all(error.errors()))
        code = "E-CONFIG"
        raise TrainError(
            code, f"{where}: {problems}", "`nmoe-train validate --schema` lists every key"
        ) from None


def describe_schema() -> list[tuple[str, str, str, str]]:
    """Every key as (path, type, default, meaning), in the order of the schema."""
    return list(_describe(Config, ()))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(
            "E-CONFIG-FILE",
            f"no configuration file at {path}",
            "give the path of a TOML file, such as apps/quickstart/config.toml",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(
            "E-CONFIG-FILE", f"cannot read {path} ({error})", "give a readable TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise TrainError(
            "E-CONFIG-TOML", f"{path}: {error}", "mend the TOML syntax there"
        ) from None


def _override(tree: dict[str, Any], keys: Sequence[str], text: str, origin: str) -> None:
    section = tree
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise TrainError(
                "E-CONFIG-SET", f"{origin}: {key} is a value, not a section", "name a key"
            )
    section[keys[-1]] = _toml_value(text)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain_all(problems: Sequence[ErrorDetails]) -> Iterator[str]:
    """A line for each key: of one that may be of several kinds, what each of these asks for."""
    known = {key for key, *_ in describe_schema()}
    kinds: dict[str, list[ErrorDetails]] = {}
    for problem in problems:
        path = [str(part) for part in problem["loc"]]
        # Below a key stands the kind that was tried, or a number, of a place in a list.
        key = ".".join(path[:-1])
        if key in known and not path[-1].isdecimal():
            kinds.setdefault(key, []).append(problem)
        else:
            yield _explain(problem)
    for key, tried in kinds.items():
        wanted = " or ".join(p["msg"].lower().removeprefix(SHOULD_BE) for p in tried)
        yield f"{key}: {SHOULD_BE}{wanted}, got {tried[0]['input']!r}"


def _explain(problem: ErrorDetails) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, FieldProblem):
        field = f"{path}.{cause.field}" if path else cause.field
        return f"{field}: {cause}"
    if problem["type"] == "extra_forbidden":
        return f"{path}: no such key{_nearest(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{path}: required, and not given"
    return f"{path}: {problem['msg'].lower()}, got {problem['input']!r}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """`; did you mean ...?` for an unknown key, from the whole schema."""
    path = ".".join(str(part) for part in location)
    known = [key for key, *_ in describe_schema()]
    by_name = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if not close:
        leaf = difflib.get_close_matches(str(location[-1]), by_name, n=1, cutoff=0.6)
        close = [by_name[name] for name in leaf]
    return f"; did you mean {close[0]}?" if close else ""


def _describe(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        nested = _section_of(field)
        if nested is not None:
            yield from _describe(nested, (*path, name))
        else:
            meaning = " ".join((field.description or "").split())
            yield ".".join((*path, name)), _type_name(field), _default(field), meaning


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None  # type: ignore[return-value]  # narrowed above


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "absent" if field.default is None else str(field.default)


def _type_name(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    arguments = get_args(annotation)
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return " | ".join(f'"{argument}"' for argument in arguments)
    parts = [part for part in arguments if part is not type(None)] or [annotation]
    if annotation in (list[str],):
        return "list of str"
    return ", ".join(_plain_type(part) for part in parts)


def _plain_type(annotation: Any) -> str:
    base = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if get_origin(base) is Literal:
        return " | ".join(f'"{word}"' for word in get_args(base))
    return getattr(base, "__name__", str(base))
