"""Training on several processes: starting torchrun, and reading what every rank left behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file
from torch import Tensor

WORKER = Path(__file__).with_name("layout_worker.py")
EXPERTS = 8
CONFIG = f"""
[run]
device = "cpu"
# Of the first 70 seeds, the one whose closest choice of an expert is the clearest: scores differ by
# 3e-6, many times what another order of sums in fp32 moves them, so that no layout chooses another.
seed = 24
[model]
width = 32
layers = 3
dense_layers = 1
heads = 2
dense_width = 48
positions = 64
[model.attention]
kv_lora_rank = 12
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
[model.moe]
experts = {EXPERTS}
top_k = 2
expert_width = 16
bias_update_rate = 0.01
balance_loss = 0.01
z_loss = 0.001
[train]
steps = 20
seq_len = 32
batch_size = 12
clip_norm = 1.0
[optimizer]
lr = 3e-3
# Adam divides by the root of the second moment; this keeps rounding small where that is, too.
eps = 1e-6
[checkpoint]
every = 10
keep = 3
[eval]
every = 10
sequences = 18
"""


@dataclass(frozen=True)
class Case:
    """A run of `nmoe-train run` on the first `processes` ranks; `run` names its folder.

    sets: keys to override. signal: (rank, step) after which that rank is asked to stop. fail:
    (rank, n, "dies" or "full"): what happens to a rank before the n-th durable change that it makes
    to a checkpoint.
    """

    name: str
    processes: int
    sets: dict[str, object] = field(default_factory=dict)
    run: str = ""
    signal: tuple[int, int] | None = None
    fail: tuple[int, int, str] | None = None


@dataclass(frozen=True)
class Rank:
    """What one rank of a case left behind."""

    folder: Path
    name: str

    @cached_property
    def result(self) -> dict[str, Any]:
        """Its exit `code` and, for each step, its numbers and expert loads (`steps`)."""
        content: dict[str, Any] = json.loads((self.folder / f"{self.name}.json").read_text())
        return content

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.folder / f"{self.name}.txt").read_text()

    def weights(self, moment: str) -> dict[str, Tensor]:
        """Its weights, "initial" or "final", by the names of checkpoints."""
        return load_file(self.folder / f"{self.name}-{moment}.safetensors")


class Results:
    """The cases of a pool, by name."""

    def __init__(self, folder: Path, cases: list[Case]) -> None:
        self.folder = folder
        self.cases = {case.name: case for case in cases}

    def ranks(self, name: str) -> list[Rank]:
        """All ranks of a case."""
        return [Rank(self.folder, f"{name}-{n}") for n in range(self.cases[name].processes)]

    def run(self, name: str) -> Path:
        """The run folder of a case."""
        return self.folder / "runs" / (self.cases[name].run or name)


def run_cases(folder: Path, data: Path, cases: list[Case], processes: int) -> Results:
    """Trains all cases in one torchrun; those that share a run go on from one another."""
    config = folder / "config.toml"
    config.write_text(CONFIG)
    results = Results(folder, cases)
    listed = []
    for case in cases:
        sets = {"run.dir": results.run(case.name), "data.dir": data, **case.sets}
        overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        hooks = {"signal": case.signal, "fail": case.fail}
        listed.append(
            {
                "name": case.name,
                "processes": case.processes,
                "arguments": [str(config), *overrides],
                **{name: value for name, value in hooks.items() if value is not None},
            }
        )
    (folder / "cases.json").write_text(json.dumps(listed))
    process = torchrun(processes, str(WORKER), str(folder / "cases.json"))
    output = process.communicate(timeout=540)[0]
    assert process.returncode == 0, output
    return results


def torchrun(processes: int, *command: str) -> subprocess.Popen[str]:
    """Starts a command on several processes of this host; its output is one text stream."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(processes), *command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def metrics(run: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """A rank's record of each step; of two attempts at a step the later one counts."""
    found: dict[int, dict[str, Any]] = {}
    attempts = json.loads((run / "run.json").read_text())["attempt"]
    for attempt in range(1, attempts + 1):
        rows: list[dict[str, Any]] = []
        for part in sorted((run / "metrics").glob(f"{attempt}-{rank}-[0-9][0-9][0-9].parquet")):
            rows += pq.read_table(part).to_pylist()
        live = run / "metrics" / f"{attempt}-{rank}.jsonl"
        if live.exists():
            rows += [json.loads(line) for line in live.read_text().splitlines()]
        found |= {row["step"]: row for row in rows}
    return found


def saved(run: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from all its files; no name stands in two of them."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        more = load_file(file)
        assert not tensors.keys() & more.keys()
        tensors |= more
    return tensors
