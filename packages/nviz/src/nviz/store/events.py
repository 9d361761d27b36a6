"""The events of one run: read on from where the last reading ended, or the newest ones at once.

At most the newest `MOST` are kept.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nviz.store.lines import GrowingLines, last_lines
from nviz.store.parse import number, parse_lines, step_number

EVENTS = "events.jsonl"
MOST = 20_000
OWN_FIELDS = ("time_unix_s", "event", "step")


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl; `detail` holds its other fields."""

    time_unix_s: float | None
    event: str
    step: int | None
    detail: dict[str, Any]

    @property
    def detail_text(self) -> str:
        """The other fields as JSON, empty if there are none."""
        return json.dumps(self.detail, sort_keys=True) if self.detail else ""


class EventLog:
    """The events of the run in `folder`. Not safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._lines = GrowingLines(folder / EVENTS)
        self._unreadable: str | None = None
        self.events: deque[Event] = deque(maxlen=MOST)

    def refresh(self) -> None:
        """Reads what was added since the last call."""
        self._unreadable = None
        try:
            for at_start, data in self._lines.new_blocks_from():
                if at_start:
                    self.events.clear()
                records, skipped = parse_lines(data)
                self._lines.skipped += skipped
                self.events += [_event(record) for record in records]
        except OSError as error:
            self._unreadable = f"events.jsonl: {error.strerror or error}"

    def problems(self) -> list[str]:
        """What could not be read: the file, or how many of its lines."""
        count = self._lines.skipped
        found = [self._unreadable] if self._unreadable else []
        return found + ([f"events.jsonl: {count} unreadable line(s) skipped"] if count else [])


def newest_events(folder: Path, most_bytes: int) -> tuple[list[Event], bool]:
    """The events in the last `most_bytes` of a run's events.jsonl, and whether older ones are left
    out. Raises OSError if the file cannot be read.
    """
    data, is_cut = last_lines(folder / EVENTS, most_bytes)
    lines = data.splitlines(keepends=True)
    records, _ = parse_lines(b"".join(lines[-MOST:]))
    return [_event(record) for record in records], is_cut or len(lines) > MOST


def _event(record: dict[str, Any]) -> Event:
    return Event(
        time_unix_s=number(record.get("time_unix_s")),
        event=str(record.get("event"))[:200],
        step=step_number(record.get("step")),
        detail={name: value for name, value in record.items() if name not in OWN_FIELDS},
    )
