"""How fast nviz is in a real Chromium, what it costs the trainer, whether its memory stays flat.

    nviz demo --out RUNS --runs 1000 --steps 100000
    python infra/bench/nviz.py RUNS --json infra/bench/results/nviz-cpu.json

Browser and server share the machine's cores. A time is from the moment the address is asked for
(or a key pressed) to the moment the page shows what was asked for: text in the list, fifty lines in
the chart, the picture of the heat map. `cold` is the first time that the server sees these files,
`warm` the median of later ones; the browser has the server's scripts in its cache throughout.
"""

import argparse
import atexit
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from playwright.sync_api import BrowserContext, Page, sync_playwright

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from browser import (  # noqa: E402  # only on the path from here on
    ARGUMENTS,
    chromium,
    free_port,
    start_dashboard,
    stop_dashboard,
)
from run_folder import RunFolder, expert_record, record, trained  # noqa: E402

REPEATS = 5
PATIENCE_MS = 120_000
COMPARED = 50
COMPARISON = "/compare?q=moonlet+completed"
LARGEST = "deepseek-0048"
LIST_READY = "() => document.querySelector('[data-testid=stDataFrame] td')"
LINES_READY = f"() => document.querySelectorAll('.scatterlayer .trace').length >= {COMPARED}"
MAP_READY = "() => document.querySelectorAll('.heatmaplayer image').length >= 2"
TARGETS_S = {"runs": 3.0, "compare": 2.0, "router": 2.0, "live": 3.0}
LOGGED_STEPS = 4000
LOGGING_ROUNDS = 5
POLL_HZ = 10.0
# Reads a run ten times a second, as pages that follow it do.
POLL = f"""
import sys, time
from pathlib import Path
from nviz.store import Workspace
space = Workspace(Path(sys.argv[1]))
while True:
    for run in space.runs().values():
        space.columns.rows(run.folder, ["loss/train", "step_ms", "tokens", "time_unix_s"])
        space.events(run)
        with space.experts(run) as loads:
            loads.blocks()
    time.sleep({1.0 / POLL_HZ})
"""
SESSIONS = 6
# The least that any Streamlit page with such a chart takes: no search, no files, no statistics.
BARE = f"""
import plotly.graph_objects as go
import streamlit as st
figure = go.Figure()
for line in range({COMPARED}):
    figure.add_scatter(x=list(range(500)), y=[line + 1 / (1 + x) for x in range(500)])
st.plotly_chart(figure)
"""


def say(name: str, found: dict[str, Any]) -> None:
    """Shows a figure as soon as it is there."""
    sys.stdout.write(f"{name} {json.dumps(found)}\n")
    sys.stdout.flush()


def timed(page: Page, act: Callable[[], object], ready: str) -> float:
    """Seconds from `act` until the page is as `ready`, a JavaScript function, says."""
    started_s = time.perf_counter()
    act()
    page.wait_for_function(ready, timeout=PATIENCE_MS)
    return time.perf_counter() - started_s


def opened(context: BrowserContext, address: str, ready: str) -> float:
    """Seconds until a new tab at `address` is ready."""
    page = context.new_page()
    try:
        return timed(page, lambda: page.goto(address), ready)
    finally:
        page.close()


def with_load(found: dict[str, Any]) -> dict[str, Any]:
    """`found` with how many processes wanted the cores meanwhile."""
    return found | {"load": round(os.getloadavg()[0], 1)}


def summary(cold_s: float | None, warm_s: list[float]) -> dict[str, Any]:
    """First time, and the median of the later ones with all of them."""
    return {"cold_s": cold_s, "warm_s": statistics.median(warm_s), "warm_of_each_s": warm_s}


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far: unlike a time, they do not grow with other work."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_pages(context: BrowserContext, address: str, pid: int) -> dict[str, Any]:
    """The three pages by address, and the comparison and the heat map within an open session."""
    found: dict[str, Any] = {}
    pages = {
        "runs": ("/", LIST_READY),
        "compare": (COMPARISON, LINES_READY),
        "router": (f"/router?run={LARGEST}", MAP_READY),
    }
    for name, (path, ready) in pages.items():
        cold = opened(context, address + path, ready)
        if name == "runs":
            time.sleep(40.0)  # The lines of all runs are read meanwhile.
        before_s = cpu_s(pid)
        warm = [opened(context, address + path, ready) for _ in range(REPEATS)]
        found[name] = summary(cold, warm)
        found[name]["server_cpu_s"] = (cpu_s(pid) - before_s) / REPEATS
        say(name, found[name])
    found["compare_in_session"] = measure_comparison(context, address)
    found["beside_bare"] = measure_floor(context, address)
    found["router_in_session"] = measure_layers(context, address)
    return found


def measure_comparison(context: BrowserContext, address: str) -> dict[str, Any]:
    """From a comparison of one run to one of fifty others, cold and then warm."""
    page = context.new_page()
    page.goto(f"{address}/compare?q=quickstart-0000")
    page.wait_for_function("() => document.querySelector('.scatterlayer .trace')")
    field = page.get_by_label("Search: add all that match")

    def search(words: str) -> Callable[[], None]:
        def act() -> None:
            field.fill(words)
            field.press("Enter")

        return act

    cold = timed(page, search("mixtral completed"), LINES_READY)
    warm = []
    for words in ("qwen completed", "mixtral completed") * 3:
        search("quickstart-0000")()
        page.wait_for_function("() => document.querySelectorAll('.scatterlayer .trace').length < 9")
        warm.append(timed(page, search(words), LINES_READY))
    page.close()
    # The first look at the second word was cold too.
    found = summary(cold, warm[1:])
    say("compare in session", found)
    return found


def measure_layers(context: BrowserContext, address: str) -> dict[str, Any]:
    """From one layer's heat map to another's."""
    page = context.new_page()
    page.goto(f"{address}/router?run={LARGEST}")
    page.wait_for_function(MAP_READY, timeout=PATIENCE_MS)
    warm = []
    for layer in range(1, REPEATS + 1):
        choice = page.get_by_test_id("stSelectbox").filter(has_text="MoE layer").locator("input")
        choice.fill(str(layer))
        shown = f"() => document.body.innerText.includes('Layer {layer}: experts over steps')"
        warm.append(timed(page, lambda: choice.press("Enter"), shown))  # noqa: B023  # used at once
    page.close()
    found = summary(None, warm)
    say("router in session", found)
    return found


def measure_floor(context: BrowserContext, address: str) -> dict[str, Any]:
    """A comparison by address beside a bare Streamlit page with as many lines, in turns."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(BARE)
        command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.headless=true"]
        command += [f"--server.port={port}", "--server.address=127.0.0.1"]
        command += ["--browser.gatherUsageStats=false", "--server.fileWatcherType=none"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            places = {"bare": f"http://127.0.0.1:{port}/", "compare": f"{address}{COMPARISON}"}
            wait_until_served(places["bare"])
            for place in places.values():
                opened(context, place, LINES_READY)
            each: dict[str, list[float]] = {name: [] for name in places}
            for _ in range(REPEATS):
                for name, place in places.items():
                    each[name].append(opened(context, place, LINES_READY))
        finally:
            server.kill()
            server.wait()
    found = {f"{name}_s": statistics.median(seconds) for name, seconds in each.items()}
    found |= {"ratio": found["compare_s"] / found["bare_s"], "of_each_s": each}
    say("beside a bare page", found)
    return found


def wait_until_served(address: str) -> None:
    """Returns once a server answers."""
    end_s = time.monotonic() + PATIENCE_MS / 1e3
    while True:
        try:
            urlopen(address, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


def measure_live(context: BrowserContext) -> dict[str, Any]:
    """Seconds from a written step to its number on the run page, for ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder), "live", steps=1000, name="live run")
        run.save(steps=1_000_000, step=999)
        process, address = start_dashboard(Path(folder))
        page = context.new_page()
        page.goto(f"{address}/run?run=live")
        seconds = []
        for step in range(1000, 1010):
            # Not in step with the page's own refresh.
            page.wait_for_timeout(700 + 137 * (step - 1000))
            shown = f"() => document.body.innerText.includes('{step:,} / ')"
            act = lambda step=step: append(run, step)  # noqa: E731
            seconds.append(timed(page, act, shown))
        page.close()
        stop_dashboard(process)
    found = {"worst_s": max(seconds), "median_s": statistics.median(seconds), "steps": len(seconds)}
    say("live", found)
    return found


def append(run: RunFolder, step: int) -> None:
    """One step, as the trainer writes it."""
    run.append(record(step))
    run.append_experts(expert_record(step))
    run.save(step=step, updated_unix_s=time.time())


def resident_mib(pid: int) -> float:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_memory(context: BrowserContext, minutes: float) -> dict[str, Any]:
    """The server's memory every half minute while several sessions follow a run that trains."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder), "live", steps=1000, name="live run")
        run.save(steps=10_000_000, step=999)
        process, address = start_dashboard(Path(folder))
        stop = threading.Event()
        trainer = threading.Thread(target=train, args=(run, stop))
        trainer.start()
        paths = ("/run?run=live", "/router?run=live", "/compare?runs=live", "/")
        pages = [context.new_page() for _ in range(SESSIONS)]
        for page, path in zip(pages, paths * 2, strict=False):
            page.goto(address + path)
        readings = []
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            pages[0].wait_for_timeout(30_000)
            readings.append(round(resident_mib(process.pid), 1))
        stop.set()
        trainer.join()
        for page in pages:
            page.close()
        process.kill()
        process.communicate()
    quarter = max(1, len(readings) // 4)
    second, last = readings[quarter : 2 * quarter] or readings, readings[-quarter:]
    found = {
        "sessions": SESSIONS,
        "minutes": minutes,
        "session_minutes": SESSIONS * minutes,
        "resident_mib": readings,
        "second_quarter_mib": statistics.median(second),
        "last_quarter_mib": statistics.median(last),
    }
    say("memory", found)
    return found


def train(run: RunFolder, stop: threading.Event) -> None:
    """Writes five steps a second; seals a thousand at a time, as the trainer does."""
    rows, loads, step, part = [], [], 1000, 1
    while not stop.wait(0.2):
        append(run, step)
        rows.append(record(step))
        loads.append(expert_record(step))
        step += 1
        if len(rows) == 1000:
            run.seal(*rows, part=part)
            run.seal_experts(*loads, part=part)
            for name in ("1-0.jsonl", "1-0-experts.jsonl"):
                (run.path / "metrics" / name).write_text("")
            rows, loads, part = [], [], part + 1


def log_steps(folder: Path) -> float:
    """CPU microseconds of the trainer's thread for one step's record, the median of many steps."""
    from nmoe_train.telemetry import MetricsWriter

    shutil.rmtree(folder, ignore_errors=True)
    RunFolder(folder, "run")
    writer = MetricsWriter(folder / "run" / "metrics", 1, 0, 1000)
    row, load = record(1), expert_record(1)
    costs = []
    for step in range(LOGGED_STEPS):
        scalars, experts = row | {"step": step}, load | {"step": step}
        started_ns = time.thread_time_ns()
        writer.step(scalars, experts)
        costs.append(time.thread_time_ns() - started_ns)
        time.sleep(0.001)
    writer.close()
    return sum(costs) / len(costs) / 1e3


def measure_logging() -> dict[str, Any]:
    """What a reader at 10 Hz adds to the cost of logging; the two take turns."""
    alone, read = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "runs")
        folder.mkdir()
        log_steps(folder)  # The first steps of a process cost more.
        for _ in range(LOGGING_ROUNDS):
            alone.append(log_steps(folder))
            # Without the script's own folder on its path: there this file is called nviz too.
            reader = subprocess.Popen([sys.executable, "-P", "-c", POLL, str(folder)])
            time.sleep(3.0)
            read.append(log_steps(folder))
            if reader.poll() is not None:
                raise RuntimeError("the reader ended before the trainer did")
            reader.kill()
            reader.wait()
    found = {
        "alone_us": statistics.median(alone),
        "read_us": statistics.median(read),
        "alone_of_each_us": alone,
        "read_of_each_us": read,
        "change": statistics.median(read) / statistics.median(alone) - 1.0,
        "poll_hz": POLL_HZ,
        "what": "CPU time of the trainer's thread per step, sealing included",
    }
    say("logging", found)
    return found


def hardware() -> dict[str, Any]:
    """The machine, the versions, and how busy it was."""
    names = ("nviz", "streamlit", "duckdb", "plotly", "pyarrow", "playwright")
    browser = subprocess.run([chromium(), "--version"], capture_output=True, text=True, check=True)
    return {
        "device": "CPU",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "chromium": browser.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    } | {name: importlib.metadata.version(name) for name in names}


def main() -> None:
    """Measures the parts that are asked for, prints them and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="what `nviz demo` made: 1000 runs of 100,000 steps")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--minutes", type=float, default=10.0, help="of following, for the memory")
    parser.add_argument("--parts", nargs="*", default=["pages", "live", "memory", "logging"])
    arguments = parser.parse_args()
    report: dict[str, Any] = {"bench": "nviz", "hardware": hardware(), "targets_s": TARGETS_S}
    if arguments.json and arguments.json.exists():
        # Parts that are not measured this time stay as they were.
        report = json.loads(arguments.json.read_text()) | report
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        context = browser.new_context(viewport={"width": 1280, "height": 720})
        context.set_default_timeout(PATIENCE_MS)
        if "pages" in arguments.parts:
            process, address = start_dashboard(arguments.runs)
            atexit.register(process.kill)
            # One visit of the smallest page, so that server and browser have their code loaded.
            opened(context, f"{address}/configuration", "() => document.querySelector('td')")
            report["pages"] = with_load(measure_pages(context, address, process.pid))
            report["server_mib"] = round(resident_mib(process.pid), 1)
            stop_dashboard(process)
        if "live" in arguments.parts:
            report["live"] = with_load(measure_live(context))
        if "memory" in arguments.parts:
            report["memory"] = with_load(measure_memory(context, arguments.minutes))
        browser.close()
    if "logging" in arguments.parts:
        report["logging"] = with_load(measure_logging())
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
