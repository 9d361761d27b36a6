"""Trains layouts.toml on one GPU and on layouts of several, and compares their rates.

Every layout is a training of its own, of the same global batch, in processes started as torchrun
would; it is ended once it has made the steps that are counted. A rate is the median over those
steps. Losses are compared with the single GPU's, as the largest relative difference over the steps.

    python infra/bench/layouts.py --json infra/bench/results/layouts-h200.json
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmoe_kernels.bench.command import hardware

CONFIG = Path(__file__).with_suffix(".toml")
LAYOUTS: Mapping[str, tuple[int, dict[str, object]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "dp2, fsdp": (2, {"parallel.fsdp": "true"}),
    "tp2": (2, {"parallel.tp": 2}),
    "pp2, 1f1b": (2, {"parallel.pp": 2}),
    "pp2, zero-bubble": (2, {"parallel.pp": 2, "parallel.pipeline.schedule": "zero-bubble"}),
    "ep2, p2p": (2, {"parallel.ep": 2, "parallel.rdep.transport": "p2p"}),
    "ep2, nvshmem": (2, {"parallel.ep": 2, "parallel.rdep.transport": "nvshmem"}),
    "ep2, collective": (2, {"parallel.ep": 2, "parallel.rdep.transport": "collective"}),
}
"""Name, processes, settings."""
FIELDS = ("step_ms", "tokens_per_s", "mfu", "overlap_ratio", "memory/peak_gib")


def main() -> None:
    """Measures the layouts that are asked for, one after another."""
    options = _options()
    report: dict[str, Any] = {
        "bench": "layouts",
        "hardware": hardware("cuda"),
        "config": CONFIG.read_text(),
        "steps": [options.skip + 1, options.steps],
        "rows": [],
    }
    single: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.layouts.split(";"):
            processes, sets = LAYOUTS[name]
            run = Path(scratch) / str(len(report["rows"]))
            log = run.with_suffix(".log")
            steps = _train(run, log, processes, sets, options)
            if options.steps not in steps:
                report["rows"].append({"layout": name, "note": _last_line(log)})
                continue
            single = single or steps
            report["rows"].append(_row(name, processes, steps, single, options))
            sys.stdout.write(json.dumps(report["rows"][-1]) + "\n")
            sys.stdout.flush()
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="names, with semicolons")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--skip", type=int, default=6, help="steps that are not counted")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for one layout")
    return parser.parse_args()


def _train(
    run: Path, log: Path, processes: int, sets: Mapping[str, object], options: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """Trains until the last step that is counted; what was recorded of each step."""
    settings = [f"--set={key}={value}" for key, value in {"run.dir": run, **sets}.items()]
    command = [sys.executable, "-m", "nmoe_train", "run", str(CONFIG), *settings]
    until = time.monotonic() + options.deadline_s
    with _ranks(command, log, processes) as ranks:
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            steps = _recorded(run)
            if options.steps in steps:
                return steps
            time.sleep(0.5)
    return _recorded(run)


@contextlib.contextmanager
def _ranks(
    command: list[str], log: Path, processes: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a run, killed afterwards: what it would save is of no further use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    with log.open("wb") as output:
        for rank in range(processes):
            place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
            place |= {"LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
            told = {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
            environment = os.environ | (told if processes > 1 else {})
            ranks.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            )
        try:
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _recorded(run: Path) -> dict[int, dict[str, Any]]:
    """Records of rank 0 by step; a torn last line waits."""
    found = {}
    for file in sorted((run / "metrics").glob("*-0.jsonl")):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                record = json.loads(line)
                found[record["step"]] = record
    return found


def _row(
    name: str,
    processes: int,
    steps: Mapping[int, dict[str, Any]],
    single: Mapping[int, dict[str, Any]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    counted = [steps[step] for step in range(options.skip + 1, options.steps + 1)]
    row: dict[str, Any] = {"layout": name, "gpus": processes}
    for field in FIELDS:
        values = [record[field] for record in counted if record.get(field) is not None]
        if values:
            row[field] = statistics.median(values)
    alone = statistics.median(
        single[step]["tokens_per_s"] for step in range(options.skip + 1, options.steps + 1)
    )
    row["scaling"] = row["tokens_per_s"] / alone
    row["loss_difference"] = max(
        abs(steps[step]["loss/train"] / single[step]["loss/train"] - 1)
        for step in range(1, options.steps + 1)
    )
    return row


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return next(
        (line for line in reversed(lines) if line.startswith("E-")), lines[-1] if lines else ""
    )


if __name__ == "__main__":
    main()
