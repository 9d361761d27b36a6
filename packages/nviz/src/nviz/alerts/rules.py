"""Alert rules in TOML: a list of `[[rule]]` tables, each with a kind and its limit."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nviz.errors import VizError
from nviz.store import Run
from nviz.store.parse import finite

# Kind -> the name of its limit in TOML; None for a kind without one.
LIMITS: dict[str, str | None] = {
    "loss_not_finite": None,
    "failed": None,
    "no_step": "minutes",
    "imbalance": "above",
    "gpu_hot": "above_c",
}
FIELDS = {"kind", "name", "match"}
CODE = "E-ALERT-RULES"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `limit` is minutes, a ratio or degrees Celsius, as the kind has it; it looks at the
    runs that `match` these words, as in the search of the Runs page.
    """

    kind: str
    name: str
    limit: float = 0.0
    match: str = ""

    def concerns(self, run: Run) -> bool:
        """Whether the rule looks at `run`."""
        return run.matches(self.match)


DEFAULT_RULES = (
    Rule("loss_not_finite", "loss not finite"),
    Rule("failed", "failed"),
    Rule("no_step", "no step", 10.0),
    Rule("imbalance", "imbalance", 4.0),
    Rule("gpu_hot", "GPU hot", 85.0),
)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules in a TOML file.

    Raises VizError `E-ALERT-RULES` if it cannot be read, names an unknown kind or field, lacks a
    limit, or has two rules of one name.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise VizError(CODE, f"{path} cannot be read ({what})", "give a TOML file") from error
    entries = content.get("rule")
    if not isinstance(entries, list) or not entries or set(content) != {"rule"}:
        raise VizError(CODE, f"{path} holds no list of [[rule]] alone", "add [[rule]] tables")
    rules = tuple(_rule(entry, f"{path}, rule {at}") for at, entry in enumerate(entries, 1))
    names = [rule.name for rule in rules]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise VizError(CODE, f"{path} has two rules named {double!r}", "give each a name")
    return rules


def _is_limit(value: object) -> bool:
    found = finite(value)
    return found is not None and found > 0


def _rule(entry: Any, where: str) -> Rule:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in LIMITS:
        kinds = ", ".join(LIMITS)
        raise VizError(CODE, f"{where} has the kind {kind!r}", f"choose one of {kinds}")
    limit_name = LIMITS[kind]
    known = FIELDS | ({limit_name} if limit_name else set())
    unknown = sorted(set(entry) - known)
    if unknown:
        raise VizError(
            CODE, f"{where} has the field {unknown[0]!r}", f"use {', '.join(sorted(known))}"
        )
    limit = entry.get(limit_name, 0.0) if limit_name else 0.0
    if limit_name and not _is_limit(limit):
        raise VizError(CODE, f"{where} needs {limit_name}, a number above 0", f"set {limit_name}")
    for name in ("name", "match"):
        if not isinstance(entry.get(name, ""), str):
            raise VizError(CODE, f"{where} has a {name} that is no text", "put it in quotes")
    name = entry.get("name") or " ".join(kind.split("_"))
    return Rule(kind, name, float(limit), entry.get("match", ""))
