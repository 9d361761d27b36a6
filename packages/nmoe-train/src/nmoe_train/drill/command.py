"""What `nmoe-train drill` does with its options: prints progress, the report, and a sentence."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
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
    workers: int, count: int, faults: str, seed: int, json_file: Path | None, out: Path | None
) -> int:
    """Runs a drill; the exit code: 0 only if everything was survived without a trace.

    Raises TrainError for kinds of faults that there are not, and for a folder that is there.
    """
    kinds = _kinds(faults.split(","))
    console, began_s = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = LOG_WIDTH

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.1f} s  {text}", highlight=False, markup=False)

    plan = plan_faults(kinds, count, workers, seed)
    tell(f"{workers} workers, {plan.steps} steps, {count} faults, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="nmoe-drill-") as scratch:
        folder = Path(scratch) if out is None else _new(out)
        report = Drill(folder, workers, plan, tell).run()
    show(report, console)
    if json_file is not None:
        asked = {"workers": workers, "count": count, "kinds": kinds, "seed": seed}
        content = {**asked, **_machine(), **report.as_json()}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    console.print(report.sentence(), soft_wrap=True, highlight=False)
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
        "cores": os.cpu_count(),
    }


def _new(folder: Path) -> Path:
    if folder.exists():
        raise TrainError("E-DRILL", f"{folder} is there already", "give a new folder")
    folder.mkdir(parents=True)
    return folder
