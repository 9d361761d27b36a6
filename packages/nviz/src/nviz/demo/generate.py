"""Writes all runs of a demo, several at a time; interrupted, it goes on where it stopped.

A run is written under a hidden name and renamed when it is whole, so what is there is complete and
need not be written again. `demo.json` holds what the demo was made from.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nviz.demo.dataset import write_dataset
from nviz.demo.folder import write_run
from nviz.demo.plan import RunPlan, draw_plan
from nviz.errors import VizError

SHARDS = "shards"
RECORD = "demo.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a demo is: runs that are there, of how many, and the bytes written by this call."""

    done: int
    runs: int
    size_bytes: int


def write_demo(
    out: Path,
    *,
    runs: int,
    steps: int,
    seed: int,
    progress: Callable[[Progress], None],
    now_unix_s: float | None = None,
) -> None:
    """Writes `runs` run folders of `steps` steps and the shards that they name into `out`.

    Equal arguments (`now_unix_s`, by default this moment, among them) give equal files. Raises
    VizError `E-DEMO-OUT` if `out` holds anything but an unfinished demo of the same arguments.
    """
    now = _prepare(out, steps, seed, time.time() if now_unix_s is None else now_unix_s)
    tokens = _dataset(out, seed)
    data = {"dir": str((out / SHARDS).resolve()), "tokens": tokens}
    plans = [draw_plan(index, steps, seed, now) for index in range(runs)]
    missing = [plan for plan in plans if not (out / plan.run_id).exists()]
    size = 0
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        pending = [pool.submit(_write_whole, out, plan, data) for plan in missing]
        for done, finished in enumerate(as_completed(pending), runs - len(missing) + 1):
            size += finished.result()
            progress(Progress(done, runs, size))
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(out: Path, steps: int, seed: int, now_unix_s: float) -> float:
    """Makes `out`, or recognises it; returns the moment that the demo's times count from."""
    wanted = {"steps": steps, "seed": seed}
    path = out / RECORD
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            found = json.loads(path.read_text())
            if {name: found.get(name) for name in wanted} == wanted:
                return float(found["now_unix_s"])
        if any(out.iterdir()):
            raise _occupied(out, "is not empty")
        path.write_text(json.dumps(wanted | {"now_unix_s": now_unix_s}))
    except (ValueError, KeyError, AttributeError) as error:
        raise _occupied(out, f"holds a damaged {RECORD}") from error
    except OSError as error:
        raise _occupied(out, f"cannot be written ({error.strerror})") from error
    return now_unix_s


def _occupied(out: Path, what: str) -> VizError:
    return VizError("E-DEMO-OUT", f"{out} {what}", "give --out a new folder")


def _dataset(out: Path, seed: int) -> int:
    folder, partial = out / SHARDS, out / f".{SHARDS}.partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        write_dataset(partial, seed)
        partial.rename(folder)
    manifest = json.loads((folder / "train" / "manifest.json").read_text())
    return int(manifest["tokens"])


def _write_whole(out: Path, plan: RunPlan, data: dict[str, object]) -> int:
    """Writes one run; returns its size in bytes."""
    partial = out / f".{plan.run_id}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write_run(partial, plan, data)
    size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    partial.rename(out / plan.run_id)
    return size
