"""A real Chromium in front of a served dashboard, and a watch over what its pages do."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000


def chromium() -> str:
    """Path of the browser; without one these tests fail, as they are no use skipped."""
    path = os.environ.get("NMOE_CHROMIUM") or shutil.which("chromium")
    if not path or not Path(path).exists():
        pytest.fail("install Debian's chromium or set NMOE_CHROMIUM", pytrace=False)
    return path


@dataclass
class Watch:
    """What a page asked for and complained about."""

    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_dashboard(runs: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `nviz serve`; returns once it printed its one line."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "nviz", "serve", str(runs), "--port", str(port), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line == f"nviz serves at http://127.0.0.1:{port}", line
    return process, line.removeprefix("nviz serves at ")


def stop_dashboard(process: subprocess.Popen[str]) -> str:
    """End the server; returns what else it printed."""
    process.terminate()
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    path = chromium()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def watch() -> Watch:
    """Filled while the page lives."""
    return Watch()


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    """A fresh page; at its end nothing may have been asked of another host or complained about.

    All pages share one context, and with it the cache of Streamlit's scripts.
    """
    known = browser.contexts
    context = known[0] if known else browser.new_context(viewport={"width": 1280, "height": 720})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page = context.new_page()
    page.on("request", lambda request: note_request(watch, request.url))
    page.on("websocket", lambda socket: note_request(watch, socket.url))
    page.on("pageerror", lambda error: watch.errors.append(str(error)))
    page.on("response", lambda answer: note_answer(watch, answer.status, answer.url))
    page.on("console", lambda message: note_message(watch, message.type, message.text))
    yield page
    page.close()
    assert watch.outside == []
    assert watch.errors == []


def note_request(watch: Watch, url: str) -> None:
    """Keep what leaves the loopback."""
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
        watch.outside.append(url)


def note_answer(watch: Watch, status: int, url: str) -> None:
    """Keep failed answers. On a deep link Streamlit first looks for itself below that link."""
    searching = re.search(r"127\.0\.0\.1:\d+/[a-z]+/_stcore/", url)
    if status >= 400 and not searching:
        watch.errors.append(f"{status} {url}")


def note_message(watch: Watch, kind: str, text: str) -> None:
    """Keep errors on the console; those of failed answers are judged by `note_answer`."""
    if kind == "error" and not text.startswith("Failed to load resource"):
        watch.errors.append(text)


def step_shown(page: Page) -> int:
    """The step on the run page."""
    text = page.get_by_test_id("stMetric").filter(has_text="Step").first.inner_text()
    found = re.search(r"([\d,]+) / ", text)
    assert found, text
    return int(found[1].replace(",", ""))


def wait_for_step(page: Page, step: int) -> None:
    """Waits until the run page shows `step` or a later one, without being reloaded."""
    page.wait_for_function(
        "step => [...document.querySelectorAll('[data-testid=stMetric]')].some(tile => "
        "Number((tile.innerText.match(/([\\d,]+) \\/ /) || ['', '0'])[1]"
        ".replaceAll(',', '')) >= step)",
        arg=step,
        timeout=PATIENCE_MS,
    )
