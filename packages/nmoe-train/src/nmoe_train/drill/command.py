"""What `nmoe-train drill` does with its options: prints progress, the report, and a sentence."""

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from nmoe_train import __version__
from nmoe_train.drill.plan import KINDS, Kind, plan_faults
from nmoe_train.drill.run import Drill, show
from nmoe_train.errors import TrainError

LOG_WIDTH = 110
"""Columns of the table in a file."""


def drill_command(
    workers: int,
    count: int,
    faults: str,
    seed: int,
    json_file: Path | None,
    out: Path | None,
    sets: Sequence[str],
) -> int:
    """Runs a drill; the exit code: 0 only if everything was survived without a trace.

    `sets`: keys of the training to override. Raises TrainError for what cannot be run, and for a
    run that did not come to its end; the file then says `passed: false` and the reason.
    """
    kinds = _kinds(faults.split(","))
    console, began_s = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = LOG_WIDTH

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.1f} s  {text}", highlight=False, markup=False)

    def write(content: Mapping[str, object]) -> None:
        asked: dict[str, object] = {
            "workers": workers,
            "count": count,
            "kinds": kinds,
            "seed": seed,
            "set": [*sets],
        }
        if json_file is not None:
            taken = {"seconds": round(time.monotonic() - began_s, 1)}
            json_file.write_text(
                json.dumps(asked | _machine() | taken | dict(content), indent=1) + "\n"
            )

    plan = plan_faults(kinds, count, workers, seed)
    folder = Path(tempfile.mkdtemp(prefix="nmoe-drill-")) if out is None else _new(out)
    drill = Drill(folder, workers, plan, tell, tuple(sets))
    tell(f"{workers} workers, {plan.steps} steps, {count} faults, seed {seed}")
    try:
        report = drill.run()
    except TrainError as error:
        write({"passed": False, "reason": str(error)})
        raise
    show(report, console)
    write(report.as_json())
    console.print(report.sentence(), soft_wrap=True, highlight=False)
    if out is None and report.passed:
        shutil.rmtree(folder)
    elif out is None:
        tell(f"the runs are in {folder}")
    return 0 if report.passed else 1


def _kinds(named: Sequence[str]) -> list[Kind]:
    wanted = [name.strip() for name in named]
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        raise TrainError(
            "E-DRILL", f"there is no fault {unknown[0]!r}", f"choose of {', '.join(KINDS)}"
        )
    return [kind for kind in KINDS if kind in wanted]


def _machine() -> dict[str, object]:
    """Where this was, for who reads the file later."""
    return {
        "nmoe_train": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """The processor's name, where Linux says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _new(folder: Path) -> Path:
    if folder.exists():
        raise TrainError("E-DRILL", f"{folder} is there already", "give a new folder")
    folder.mkdir(parents=True)
    return folder
