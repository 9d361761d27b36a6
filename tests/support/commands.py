"""What the end-to-end tests share: the commands as a user starts them, and the losses of a run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

# A model that trains a step in milliseconds; everything else is the quickstart's.
SMALL = {
    "NMOE_MODEL__WIDTH": "32",
    "NMOE_MODEL__LAYERS": "2",
    "NMOE_MODEL__HEADS": "2",
    "NMOE_MODEL__DENSE_WIDTH": "64",
    "NMOE_MODEL__MOE__EXPERTS": "8",
    "NMOE_MODEL__MOE__TOP_K": "2",
    "NMOE_MODEL__MOE__EXPERT_WIDTH": "16",
    "NMOE_TRAIN__SEQ_LEN": "64",
    "NMOE_TRAIN__BATCH_SIZE": "4",
    "NMOE_DATA__TOKENIZER": "bpe:512",
    "NMOE_CHECKPOINT__EVERY": "5",
    "NMOE_EVAL__EVERY": "0",
    "NMOE_EVAL__SEQUENCES": "8",
}

Command = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def nmoe_train() -> Command:
    """Starts `nmoe-train ARGUMENTS...` with a small model; its output is one text stream."""

    def start(*arguments: str | Path, small: bool = True) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "nmoe_train", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(SMALL if small else {})},
        )

    return start


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Half a megabyte of real text: two packages of Python's own sources."""
    folder = tmp_path / "text"
    for name in ("email", "asyncio"):
        shutil.copytree(Path(os.__file__).parent / name, folder / name)
    return folder


def losses(run: Path) -> dict[int, float]:
    """`loss/train` by step; of two attempts at a step the later one counts."""
    found: dict[int, tuple[int, float]] = {}
    for path in sorted((run / "metrics").iterdir()):
        if "experts" in path.name:
            continue
        attempt = int(path.name.split("-")[0])
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            whole = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            rows = [json.loads(line) for line in whole]
        for row in rows:
            if found.get(row["step"], (0, 0.0))[0] <= attempt:
                found[row["step"]] = (attempt, row["loss/train"])
    return {step: loss for step, (_, loss) in sorted(found.items())}


def checkpoint_hashes(run: Path) -> dict[str, str]:
    """SHA-256 of every file of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*/COMPLETE")).parent
    files = json.loads((newest / "meta.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}
