"""Training on several processes: starting torchrun, and reading what every rank left behind.

The tolerance of 1e-5, relative, is for sums in fp32 that are taken in another order, over 20 steps.
Adam's moments have ten times that, as some gradients are sums that nearly cancel.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from nmoe_data.prep import prep
from safetensors.torch import load_file
from torch import Tensor

WORKER = Path(__file__).with_name("layout_worker.py")
EXPERTS = 8
TOLERANCE = 1e-5
CURVES = ("loss/train", "loss/ce", "loss/balance", "loss/z", "grad_norm")
SENTENCE = "a token goes to some experts and the router says which of them and why"
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

    sets: keys to override. signal: (rank, step) after which that rank is asked to stop. corrupt:
    (rank, step) in which a bit of that rank's summed gradients changes. fail:
    (rank, n, "dies" or "full"): what happens to a rank before the n-th durable change that it makes
    to a checkpoint. slow: (rank, seconds) that its forward passes take longer.
    """

    name: str
    processes: int
    sets: dict[str, object] = field(default_factory=dict)
    run: str = ""
    signal: tuple[int, int] | None = None
    corrupt: tuple[int, int] | None = None
    fail: tuple[int, int, str] | None = None
    slow: tuple[int, float] | None = None


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
    def began(self) -> bool:
        """Whether it came to this case."""
        return (self.folder / f"{self.name}.txt").exists()

    @property
    def ended(self) -> bool:
        """Whether it left a result."""
        return (self.folder / f"{self.name}.json").exists()

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

    def unfinished(self) -> str:
        """What ranks have printed that began a case and did not come to its end."""
        begun = [rank for name in self.cases for rank in self.ranks(name) if rank.began]
        return "\n".join(
            f"{rank.name} did not end:\n{rank.output}" for rank in begun if not rank.ended
        )


def make_shards(folder: Path) -> Path:
    """Shards of a few hundred short documents in bytes, a fifth of them held out."""
    draw = random.Random(0)
    lines = (" ".join(draw.choices(SENTENCE.split(), k=draw.randint(1, 40))) for _ in range(400))
    content = (json.dumps({"text": f"{number} {line}"}) for number, line in enumerate(lines))
    (folder / "text.jsonl").write_text("\n".join(content) + "\n")
    prep(folder / "text.jsonl", folder / "data", tokenizer="bytes", held_out=0.2)
    return folder / "data"


def run_cases(folder: Path, data: Path, cases: list[Case], processes: int) -> Results:
    """Trains all cases in one torchrun; those that share a run go on from one another."""
    config = folder / "config.toml"
    config.write_text(CONFIG)
    results = Results(folder, cases)
    listed = []
    for case in cases:
        sets = {"run.dir": results.run(case.name), "data.dir": data, **case.sets}
        overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        hooks = {name: getattr(case, name) for name in ("signal", "fail", "corrupt", "slow")}
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
    try:
        output = process.communicate(timeout=540)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        output = f"not finished in time\n{process.communicate()[0]}"
    assert process.returncode == 0, f"{output}\n{results.unfinished()}"
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
    """All tensors of a checkpoint, whole; every number of one stands in one file only."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    tensors: dict[str, Tensor] = {}
    places = json.loads((folder / "meta.json").read_text())["tensors"]
    for file in sorted(folder.glob("*.safetensors")):
        for name, part in load_file(file).items():
            place = places[name]
            pieces = {piece["file"]: piece for piece in place.get("pieces", [])}
            piece = pieces.get(file.name, {"start": [0] * part.ndim})
            whole = tensors.setdefault(name, torch.full(place["shape"], torch.nan))
            for dim, (start, length) in enumerate(zip(piece["start"], part.shape, strict=True)):
                whole = whole.narrow(dim, start, length)
            assert whole.isnan().all(), f"{name} is written twice"
            whole.copy_(part)
    assert not [name for name, tensor in tensors.items() if tensor.isnan().any()]
    return tensors


def assert_codes(ranks: list[Rank], *expected: object) -> None:
    """A case's ranks ended with these codes, or all with the one; else, what the others printed."""
    wanted = expected * (len(ranks) // len(expected))
    odd = [rank for rank, code in zip(ranks, wanted, strict=True) if rank.result["code"] != code]
    assert not odd, "\n".join(
        f"{rank.name} ended with {rank.result['code']}, not as {wanted}:\n{rank.output}"
        for rank in odd
    )


def assert_near(
    got: dict[int, dict[str, Any]], want: dict[int, dict[str, Any]], steps: int
) -> None:
    """Losses and gradient norm of every step are the same within the tolerance."""
    assert sorted(got) == sorted(want) == list(range(1, steps + 1))
    for step in want:
        for name in CURVES:
            assert got[step][name] == pytest.approx(want[step][name], rel=TOLERANCE), (step, name)


def assert_near_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Weights and moments are the same within their tolerances."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        difference = float((got[name] - tensor).norm() / tensor.norm().clamp_min(1e-12))
        moment = name.startswith("optimizer.")
        assert difference < (10 * TOLERANCE if moment else TOLERANCE), name
