"""How soon TensorBoard and trackio show a comparison of runs, beside nviz, on the same runs.

    nviz demo --out RUNS --runs 100 --steps 2000
    uv run --all-packages --with tensorboard --with trackio \\
        python infra/bench/nviz_peers.py RUNS --json infra/bench/results/nviz-peers-cpu.json

The peers are no dependencies: one that is not installed is listed as absent. The metrics `METRICS`
of every run that recorded a loss are written once in each peer's own format (`import_s`), which is
not part of the time. A time is from the moment the address is asked for to the moment the page
shows curves: `READY` says how many of what each page must hold. The three take turns; `cold` is the
first visit of a fresh server, `warm` the median of later ones. They do not draw the same: nviz and
trackio draw all runs, TensorBoard as many as its own choice takes, and each thins its curves. What
a worker of TensorBoard paints cannot be asked of the page: its time ends when the values are there.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import BrowserContext, sync_playwright

# The file nviz.py beside this one is not the package.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import nviz  # noqa: E402  # only found from here on, like what follows
from browser import (  # noqa: E402
    ARGUMENTS,
    chromium,
    free_port,
    start_dashboard,
    stop_dashboard,
)
from nviz.store import ColumnReader, RunIndex  # noqa: E402

METRICS = ("loss/train", "grad_norm", "tokens_per_s")
MOST_RUNS = 50
PATIENCE_MS = 120_000
START_S = 60.0
# Curves of a first chart. TensorBoard draws an empty one, from 0 to 1, and waits for the values.
READY = {
    "nviz": "count => document.querySelectorAll('.scatterlayer .trace').length >= count",
    "tensorboard": """() => [...document.querySelectorAll('card-view')].some(card =>
        card.querySelector('line-chart canvas') && !card.querySelector('mat-spinner')
        && [...card.querySelectorAll('.x-axis text')]
            .some(mark => parseFloat(mark.textContent) > 1))
    """,
    "trackio": "() => document.querySelectorAll('canvas, svg .mark-line path').length > 0",
}
SHOW_TRACKIO = """
import sys, trackio
trackio.show("runs", open_browser=False, block_thread=True, server_port=int(sys.argv[1]),
             host="127.0.0.1", share=False)
"""
Rows = dict[str, list[dict[str, float]]]


def read_runs(root: Path, most: int) -> Rows:
    """Records of `METRICS` by run, of the newest `most` runs that have a loss."""
    found: Rows = {}
    reader = ColumnReader()
    for run in RunIndex(root).refresh().values():
        rows = reader.rows(run.folder, METRICS)
        if METRICS[0] not in rows.columns or len(found) == most:
            continue
        counts = ~rows.superseded
        steps = rows.step[counts].tolist()
        columns = {name: rows.columns[name].values[counts].tolist() for name in rows.columns}
        found[run.key] = [
            {"step": step} | {name: values[at] for name, values in columns.items()}
            for at, step in enumerate(steps)
        ]
    return found


def write_tensorboard(runs: Rows, folder: Path) -> None:
    """One event file a run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name, rows in runs.items():
        writer = EventFileWriter(str(folder / name))
        for row in rows:
            values = [
                Summary.Value(tag=metric, simple_value=row[metric])
                for metric in METRICS
                if metric in row
            ]
            step = int(row["step"])
            writer.add_event(
                Event(step=step, wall_time=1.79e9 + step, summary=Summary(value=values))
            )
        writer.close()


def write_trackio(runs: Rows, folder: Path) -> None:
    """One project of all runs, in trackio's own database."""
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage

    for name, rows in runs.items():
        metrics = [{metric: row[metric] for metric in METRICS if metric in row} for row in rows]
        SQLiteStorage.bulk_log("runs", name, metrics, [int(row["step"]) for row in rows])


@contextmanager
def served(command: list[str], port: int, **variables: str) -> Iterator[str]:
    """A peer's server; its address, once it answers."""
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end_s = time.monotonic() + START_S
        while True:
            try:
                urlopen(address, timeout=5).close()
                break
            except (URLError, OSError):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise
                time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


@contextmanager
def served_nviz(root: Path) -> Iterator[str]:
    """nviz over the runs themselves."""
    process, address = start_dashboard(root)
    try:
        yield address
    finally:
        stop_dashboard(process)


def opened(
    context: BrowserContext, address: str, ready: str, count: int, picture: Path | None = None
) -> float:
    """Seconds until a new tab at `address` shows curves; `picture` keeps how it looks then."""
    page = context.new_page()
    try:
        started_s = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_function(ready, arg=count, timeout=PATIENCE_MS)
        seconds = time.perf_counter() - started_s
        if picture:
            page.screenshot(path=str(picture))
        return seconds
    finally:
        page.close()


def start(name: str, root: Path, runs: Rows, scratch: Path, stack: ExitStack) -> tuple[str, float]:
    """Serve the runs by one of the three: the address of the comparison, and seconds of import."""
    started_s, port = time.perf_counter(), free_port()
    if name == "nviz":
        query = "&".join(f"runs={key}" for key in runs)
        return f"{stack.enter_context(served_nviz(root))}/compare?{query}", 0.0
    if name == "tensorboard":
        write_tensorboard(runs, scratch)
        took_s = time.perf_counter() - started_s
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(scratch)]
        command += ["--port", str(port), "--host", "127.0.0.1", "--load_fast", "false"]
        return f"{stack.enter_context(served(command, port))}/#timeseries", took_s
    write_trackio(runs, scratch)
    took_s = time.perf_counter() - started_s
    command = [sys.executable, "-c", SHOW_TRACKIO, str(port)]
    address = stack.enter_context(served(command, port, TRACKIO_DIR=str(scratch)))
    return f"{address}/?project=runs", took_s


def measure(root: Path, most: int, repeats: int, pictures: Path | None) -> dict[str, Any]:
    """Times of each dashboard that is installed, in turns; those that are not are absent."""
    runs = read_runs(root, most)
    installed = [name for name in READY if importlib.util.find_spec(name)]
    report: dict[str, Any] = {
        "runs": len(runs),
        "steps": max(map(len, runs.values())),
        "metrics": METRICS,
    }
    with ExitStack() as stack:
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=chromium(), args=ARGUMENTS
        )
        context = browser.new_context(viewport={"width": 1280, "height": 720})
        places = {}
        for name in installed:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            places[name], import_s = start(name, root, runs, scratch, stack)
            cold_s = opened(context, places[name], READY[name], len(runs))
            version = nviz.__version__ if name == "nviz" else importlib.metadata.version(name)
            report[name] = {"version": version, "import_s": import_s, "cold_s": cold_s, "each": []}
        for _ in range(repeats):
            for name, address in places.items():
                picture = pictures / f"{name}.png" if pictures else None
                seconds = opened(context, address, READY[name], len(runs), picture)
                report[name]["each"].append(seconds)
        browser.close()
    for name in READY:
        if name not in installed:
            report[name] = "absent"
            continue
        each = report[name].pop("each")
        report[name] |= {
            "warm_s": statistics.median(each),
            "warm_min_s": min(each),
            "warm_of_each_s": each,
        }
    return report


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="what `nviz demo` made")
    parser.add_argument("--most", type=int, default=MOST_RUNS, help="runs to compare")
    parser.add_argument("--repeats", type=int, default=5, help="warm visits of each")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each when ready")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    report = {"bench": "nviz-peers", "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    report |= measure(arguments.runs, arguments.most, arguments.repeats, arguments.pictures)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
