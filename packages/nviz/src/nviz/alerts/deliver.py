"""Tells others of an alert: a line in a run's events, or a call of a webhook."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nviz.errors import VizError

TIMEOUT_S = 10.0
TRIES = 3
FIRST_WAIT_S = 1.0
# Answers after which trying again may help.
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


def write_event(folder: Path, event: dict[str, Any]) -> None:
    """Appends one line to the run's events.jsonl in a single write, as its trainer does.

    A line that something cut short is ended first. Raises OSError; a run whose folder is gone is
    left alone.
    """
    path = folder / "events.jsonl"
    if not folder.is_dir() or path.is_symlink():
        return
    line = json.dumps(event).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


class Webhook:
    """An address that gets each alert as a JSON object by POST."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """Raises VizError `E-WEBHOOK` if `url` is no http address."""
        self._url = url
        self._sleep = sleep
        # The rest of the address may be a secret.
        self.host = _host(url)

    def send(self, content: dict[str, Any], identity: str) -> str | None:
        """Posts `content`, at most `TRIES` times; returns why it did not arrive, or None.

        `identity` goes along as `Idempotency-Key`, so that a receiver can tell a repeat.
        """
        problem = None
        for attempt in range(TRIES):
            if attempt:
                self._sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            problem, again = self._post(content, identity)
            if problem is None or not again:
                return problem
        return problem

    def _post(self, content: dict[str, Any], identity: str) -> tuple[str | None, bool]:
        """Why one try failed (None if it did not), and whether another may help."""
        request = urllib.request.Request(
            self._url,
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": identity},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return None, False
        except urllib.error.HTTPError as error:
            return f"{self.host} answered {error.code}", error.code in TRY_AGAIN
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            return f"{self.host} cannot be reached ({reason})", True


def _host(url: str) -> str:
    """The host that `url` names. Raises VizError `E-WEBHOOK` if it is no http address."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
        raise VizError("E-WEBHOOK", "the webhook is no http address", "give http(s)://...")
    return parts.hostname
