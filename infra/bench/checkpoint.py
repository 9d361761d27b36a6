"""Saves and loads a state beside torch.distributed.checkpoint, on the disk whose own rate it takes.

On each number of processes, every rank has a state of its own. In each round the contenders take
turns: a plain file of the same size written and read past the page cache (the disk's own rate), a
save and a load of nmoe-train, and `async_save` and `load` of torch.distributed.checkpoint (DCP). A
pause is the time until the training may go on and has changed a first tensor; a commit the time
until all is durable. Every load is compared with the state. nmoe-train's save reads its files back
and its load checks their SHA-256 first; DCP does neither. On a GPU there is one contender more,
`dcp_pinned`: DCP with a stager that is kept and that pins its memory, which is not its default.
Figures are medians over rounds, the first one left out.

`--training` then trains layouts.toml, saving every few steps, for the share that a save's pause
has in a step; the first save, which makes its buffers, is left out.

    python infra/bench/checkpoint.py --json infra/bench/results/checkpoint-cpu.json
    python infra/bench/checkpoint.py --device cuda --processes 1 --training --json NEW.json
"""

import argparse
import contextlib
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nmoe_kernels.bench.command import hardware
from nmoe_train.checkpoint import Saver, newest_sound_checkpoint
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups, open_groups
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

TENSOR_BYTES = 8 << 20
CHUNK_BYTES = 16 << 20
META: dict[str, Any] = {"tokens": 0, "updates": 0, "fields": {}}
TRAINING = Path(__file__).with_name("layouts.toml")
TRAINED_LAYERS, TRAINED_STEPS, SAVE_EVERY = 2, 390, 130
"""Few layers, so that a slow disk has written a state before the next one is saved."""


def main() -> None:
    """Starts the ranks of each number of processes, or is one of them."""
    options = _options()
    if "RANK" in os.environ:
        _rank(options)
        return
    report: dict[str, Any] = {
        "bench": "checkpoint",
        "hardware": {
            **hardware(options.device),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "file_system": _file_system(options.dir),
            "load_average": os.getloadavg(),
        },
        "mib_per_rank": options.mib,
        "rounds": options.rounds,
        "rows": [],
    }
    for processes in map(int, options.processes.split(",")):
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(processes), __file__, *sys.argv[1:], "--dir", scratch),
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment)
            report["rows"].append(json.loads((Path(scratch) / "row.json").read_text()))
    if options.training:
        report["training"] = _training(options)
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the state")
    parser.add_argument("--mib", type=int, default=512, help="state of a rank")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--training", action="store_true", help="take the share of a step too")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _training(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, with saves, and compares their pauses with the steps between them."""
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        run = Path(scratch) / "run"
        settings = {
            "run.dir": run,
            "run.device": options.device,
            "model.layers": TRAINED_LAYERS,
            "train.steps": TRAINED_STEPS,
            "checkpoint.every": SAVE_EVERY,
            "checkpoint.keep": 1,
        }
        told = [f"--set={key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "nmoe_train", "run", str(TRAINING), *told]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (run / "metrics").glob("*-0.jsonl")
        steps = [json.loads(line) for file in lines for line in file.read_text().splitlines()]
        saved = [path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file()]
    pauses = [step["checkpoint/stall_ms"] for step in steps if "checkpoint/stall_ms" in step][1:]
    commits = [step["checkpoint/commit_ms"] for step in steps if "checkpoint/commit_ms" in step]
    step_ms = statistics.median(step["step_ms"] for step in steps)
    pause_ms = statistics.median(pauses)
    return {
        "config": TRAINING.read_text(),
        "settings": {name: str(value) for name, value in settings.items() if name != "run.dir"},
        "bytes": sum(saved),
        "step_ms": step_ms,
        "pause_ms": pause_ms,
        "pauses_ms": pauses,
        "commits_ms": commits,
        "pause_in_steps": pause_ms / step_ms,
        "pause_share": pause_ms / (SAVE_EVERY * step_ms),
    }


def _rank(options: argparse.Namespace) -> None:
    """Measures, with all other ranks, and lets rank 0 write the row."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with contextlib.ExitStack() as held:
        layout = Layout(dp=ranks, rank=rank)
        if ranks == 1:
            dist.init_process_group("gloo")
            held.callback(dist.destroy_process_group)
        device = torch.device(options.device, rank if options.device == "cuda" else None)
        groups = held.enter_context(open_groups(layout, device, 600.0))
        rounds = _rounds(options, groups, device)
    if rank == 0:
        size = ranks * (options.mib << 20)
        row = {"processes": ranks, **_summary(rounds[1:], size)}
        (options.dir / "row.json").write_text(json.dumps(row))


def _rounds(
    options: argparse.Namespace, groups: Groups, device: torch.device
) -> list[dict[str, float]]:
    """Seconds of every contender, round after round."""
    rank, found = groups.layout.rank, []
    count = (options.mib << 20) // TENSOR_BYTES
    draw = torch.Generator(device).manual_seed(rank)
    state = {
        f"model.{rank}.{n}": torch.randn(TENSOR_BYTES // 4, generator=draw, device=device)
        for n in range(count)
    }
    first = next(iter(state.values()))

    def train() -> None:
        """Changes the state in place to what it is, as the next update would."""
        first.mul_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    saver = Saver(options.dir / "ours", 1, groups=groups)
    # Its thread talks while the ranks here do.
    own = dist.new_group(backend="gloo")
    stagers: dict[str, AsyncStager | None] = {"dcp": None}
    if device.type == "cuda":
        stagers["dcp_pinned"] = _KeptStager()
    for number in range(1, options.rounds + 1):
        seconds: dict[str, float] = {}
        timed = _Timed(seconds)
        raw = options.dir / f"raw-{rank}"
        timed("raw_write", lambda raw=raw: _write_raw(raw, options.mib << 20))
        timed("raw_read", lambda raw=raw: _read_raw(raw))
        raw.unlink()
        timed("ours_pause", lambda n=number: (saver.begin(n, state, META), train()))
        timed("ours_commit", saver.settle, after="ours_pause")
        timed("ours_load", lambda: _load_ours(options.dir / "ours", groups, target))
        _check(state, target)
        for name, stager in stagers.items():
            _dcp(name, stager, options.dir / "dcp", state, target, own, train, timed)
            _check(state, target)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(options.dir / "dcp")
            dist.barrier()
        found.append(seconds)
    saver.leave(wait=True)
    return found


class _KeptStager(DefaultStager):
    """Pins its memory and keeps it: torch 2.11 closes a given stager after a save."""

    def __init__(self) -> None:
        super().__init__(StagingOptions(True, False, False, True))

    def close(self) -> None:
        """Leaves everything for the next save."""


class _Timed:
    """Times what all ranks do, from the first one's start to the last one's end."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def __call__(self, name: str, action: Callable[[], Any], after: str | None = None) -> None:
        if after is None:
            dist.barrier()
        began_s = time.perf_counter()
        action()
        longest = torch.tensor(time.perf_counter() - began_s)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        self._seconds[name] = float(longest) + (self._seconds[after] if after else 0.0)


def _dcp(
    name: str,
    stager: AsyncStager | None,
    place: Path,
    state: dict[str, torch.Tensor],
    target: dict[str, torch.Tensor],
    group: dist.ProcessGroup,
    train: Callable[[], None],
    timed: "_Timed",
) -> None:
    saving: list[Any] = []

    def begin() -> None:
        save = {"checkpoint_id": place, "process_group": group, "async_stager": stager}
        saving.append(dcp.async_save(state, **save))
        train()

    timed(f"{name}_pause", begin)
    timed(f"{name}_commit", lambda: saving[0].result(), after=f"{name}_pause")
    _forget(place)
    timed(f"{name}_load", lambda: dcp.load(target, checkpoint_id=place, process_group=group))


def _load_ours(root: Path, groups: Groups, target: dict[str, torch.Tensor]) -> None:
    checkpoint, problems = newest_sound_checkpoint(root, groups)
    assert checkpoint is not None and not problems
    saved = checkpoint.tensors()
    for name, tensor in target.items():
        tensor.copy_(saved[name])


def _check(state: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        assert torch.equal(tensor, target[name]), name
        target[name].zero_()


def _write_raw(path: Path, size: int) -> None:
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        buffer[:] = os.urandom(CHUNK_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        for _ in range(size // CHUNK_BYTES):
            assert os.write(descriptor, buffer) == CHUNK_BYTES
        os.fsync(descriptor)
        os.close(descriptor)


def _read_raw(path: Path) -> None:
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)


def _forget(folder: Path) -> None:
    """Drops files from the page cache, so that a load is of the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _summary(rounds: list[dict[str, float]], size: int) -> dict[str, Any]:
    """Medians: pauses in milliseconds, everything else as a rate too, with its spread."""
    row: dict[str, Any] = {"bytes": size}
    for name in rounds[0]:
        times = sorted(seconds[name] for seconds in rounds)
        middle = statistics.median(times)
        row[f"{name}_ms"] = middle * 1e3
        row[f"{name}_min_ms"], row[f"{name}_max_ms"] = times[0] * 1e3, times[-1] * 1e3
        if not name.endswith("pause"):
            row[f"{name}_mb_s"] = size / middle / 1e6
    row["pause_ratio"] = row["ours_pause_ms"] / row["dcp_pause_ms"]
    row["save_share_of_disk"] = row["ours_commit_mb_s"] / row["raw_write_mb_s"]
    row["load_share_of_disk"] = row["ours_load_mb_s"] / row["raw_read_mb_s"]
    return row


def _file_system(place: Path) -> str:
    command = ["findmnt", "-n", "-o", "FSTYPE", "-T", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
