"""Looks at all runs again and again, and tells what changed: each alert once when it is raised and
once when it is over.

What was told is remembered in a file if one is given, so that a look of a scheduler does not repeat
what the last one said. A webhook that could not be reached gets the news in the next look.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nviz.alerts.check import Alert, broken_rules, facts_of_files
from nviz.alerts.deliver import Webhook, write_event
from nviz.alerts.rules import Rule
from nviz.errors import VizError
from nviz.store import ColumnReader, Run, RunIndex
from nviz.store.heat import Heat

log = logging.getLogger("nviz")

RAISED, OVER = "raised", "over"
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """An alert that was raised or is over, and when that was seen."""

    state: str
    alert: Alert
    time_unix_s: float

    @property
    def identity(self) -> str:
        """The same for every telling of this change."""
        text = json.dumps([self.state, self.alert.run, self.alert.rule, self.time_unix_s])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Watch:
    """The alerts of all runs under a folder, and to whom their changes are told."""

    def __init__(
        self,
        root: Path,
        rules: Sequence[Rule],
        *,
        webhook: Webhook | None,
        write_events: bool,
        memory: Path | None,
    ) -> None:
        """Raises VizError `E-RUNS-MISSING`, or `E-ALERT-STATE` if `memory` is damaged."""
        self._index = RunIndex(root)
        self._rules = rules
        self._webhook = webhook
        self._write_events = write_events
        self._memory = memory
        self._columns = ColumnReader()
        self._heat = Heat()
        self.raised: dict[Key, Alert] = {}
        self._unsent: list[Change] = []
        if memory is not None:
            self.raised, self._unsent = _remembered(memory)

    def look(self, now_unix_s: float) -> list[Change]:
        """What changed since the last look; it is written and sent before this returns."""
        runs = self._index.refresh(now_unix_s)
        found = {}
        for run in runs.values():
            if run.status == "unreadable":
                continue
            facts = facts_of_files(run, self._columns, self._heat)
            for alert in broken_rules(run, facts, self._rules, now_unix_s):
                found[(alert.run, alert.rule)] = alert
        begun = [found[key] for key in found.keys() - self.raised.keys()]
        ended = [self.raised[key] for key in self.raised.keys() - found.keys()]
        changes = [Change(RAISED, alert, now_unix_s) for alert in begun]
        changes += [Change(OVER, alert, now_unix_s) for alert in ended]
        changes.sort(key=lambda change: (change.alert.run, change.alert.rule))
        self.raised = found
        self._tell(changes, runs)
        return changes

    def _tell(self, changes: list[Change], runs: dict[str, Run]) -> None:
        if self._write_events:
            for change in changes:
                self._write(change, runs)
        if self._webhook is not None:
            pending, self._unsent = self._unsent + changes, []
            for at, change in enumerate(pending):
                problem = self._webhook.send(_content(change), change.identity)
                if problem is not None:
                    log.warning("alert not sent: %s", problem)
                    # The others would wait for the same silence.
                    self._unsent = pending[at:]
                    break
        if self._memory is not None:
            _remember(self._memory, self.raised, self._unsent)

    def _write(self, change: Change, runs: dict[str, Run]) -> None:
        run = runs.get(change.alert.run)
        if run is None:
            return
        event = {
            "time_unix_s": change.time_unix_s,
            "event": "alert",
            "step": change.alert.step,
            "rule": change.alert.rule,
            "state": change.state,
            "what": change.alert.what,
        }
        try:
            write_event(run.folder, event)
        except OSError as error:
            log.warning("alert of %s not written: %s", run.key, error.strerror)


def _content(change: Change) -> dict[str, object]:
    return {"state": change.state, "time_unix_s": change.time_unix_s} | asdict(change.alert)


def _remembered(path: Path) -> tuple[dict[Key, Alert], list[Change]]:
    """The alerts that were raised, and the changes that a webhook still has to be told."""
    try:
        content = json.loads(path.read_text())
        raised = [Alert(**entry) for entry in content["raised"]]
        unsent = [
            Change(entry["state"], Alert(**entry["alert"]), entry["time_unix_s"])
            for entry in content["unsent"]
        ]
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise VizError(
            "E-ALERT-STATE", f"{path} is no state of alerts ({error})", "remove it or name another"
        ) from error
    return {(alert.run, alert.rule): alert for alert in raised}, unsent


def _remember(path: Path, raised: dict[Key, Alert], unsent: Sequence[Change]) -> None:
    content = {
        "raised": [asdict(alert) for alert in raised.values()],
        "unsent": [asdict(change) for change in unsent],
    }
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError as error:
        raise VizError(
            "E-ALERT-STATE", f"{path} cannot be written ({error.strerror})", "name another file"
        ) from error
