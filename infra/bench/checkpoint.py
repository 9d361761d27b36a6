"""Saves and loads a state beside torch.distributed.checkpoint, on the disk whose own rate it takes.

On each number of processes, every rank has a state of its own, which changes every round. In each
round the contenders go in a random order: a plain file of the same size written and read past the
page cache (the disk's own rate), a save and a load of nmoe-train, and `async_save` and `load` of
torch.distributed.checkpoint (DCP). A pause is the time until the training may go on and has changed
a first tensor; a commit the time until all is durable. Every load is compared with what was to be
saved. nmoe-train's save reads its files back and its load checks their SHA-256 first; DCP does
neither. On a GPU there is one contender more, `dcp_pinned`: DCP with its stager that is kept, pins
its memory and copies tensor by tensor, which is not the default. Figures are medians over rounds,
the first one left out.

`--training` then trains layouts.toml on a GPU, with saves, for the share that a pause has in the
steps between; the first save, which makes its buffer, is left out.

    python infra/bench/checkpoint.py --json infra/bench/results/checkpoint-cpu.json
    python infra/bench/checkpoint.py --device cuda --processes 1 --training --json NEW.json
"""

import argparse
import contextlib
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nmoe_kernels.bench.command import hardware
from nmoe_train.checkpoint import Saver, newest_sound_checkpoint
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups, open_groups
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

TENSOR_BYTES = 8 << 20
CHUNK_BYTES = 16 << 20
META: dict[str, Any] = {"tokens": 0, "updates": 0, "fields": {}}
TRAINING = Path(__file__).with_name("layouts.toml")
TRAINED_LAYERS = 2
"""Few, so that a slow disk has written a state before the next one is saved."""
TRAINED_STEPS, SAVE_EVERY = 540, 130
"""The last save is that of the end, which no step waits for."""


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
    _write(report, options.json)
    if options.training:
        report["training"] = _training(options)
        _write(report, options.json)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the state")
    parser.add_argument("--mib", type=int, default=512, help="state of a rank")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--training", action="store_true", help="take the share of a step too")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.training and options.device == "cpu":
        parser.error("--training takes a GPU: add --device cuda")
    return options


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
        steps = pq.read_table(run / "metrics" / "1-0-000.parquet").to_pylist()
        saved = [path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file()]
    pauses, commits = (
        [step[field] for step in steps if step[field] is not None][1:]
        for field in ("checkpoint/stall_ms", "checkpoint/commit_ms")
    )
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
    state = _State(options.mib, groups.layout.rank, device)
    saver = Saver(options.dir / "ours", 1, groups=groups, device=device)
    # Its thread talks while the ranks here do.
    dcp_group = dist.new_group(backend="gloo")
    stagers: dict[str, AsyncStager | None] = {"dcp": None}
    if device.type == "cuda":
        stagers["dcp_pinned"] = BlockingAsyncStager(cache_staged_state_dict=True)
    contenders: dict[str, Callable[[_Timed], None]] = {
        "raw": lambda timed: _raw(options, groups.layout.rank, timed),
        "ours": lambda timed: _ours(saver, options.dir / "ours", groups, state, timed),
        **{
            name: lambda timed, name=name, stager=stager: _dcp(
                name, stager, options.dir / "dcp", state, dcp_group, timed
            )
            for name, stager in stagers.items()
        },
    }
    orders, found = random.Random(0), []
    for _ in range(options.rounds):
        state.move_on()
        seconds: dict[str, float] = {}
        for name in orders.sample(list(contenders), len(contenders)):
            contenders[name](_Timed(seconds))
        found.append(seconds)
    saver.leave(wait=True)
    return found


class _State:
    """What a rank saves, what it shall be when it is loaded, and where it is loaded to."""

    def __init__(self, mib: int, rank: int, device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(rank)
        self._device, self.number = device, 0
        self.tensors = {
            f"model.{rank}.{n}": torch.randn(TENSOR_BYTES // 4, generator=draw, device=device)
            for n in range((mib << 20) // TENSOR_BYTES)
        }
        self.target = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self._first = next(iter(self.tensors))
        self._kept = self.tensors[self._first].clone()

    def move_on(self) -> None:
        """Changes every tensor."""
        self.number += 1
        for tensor in self.tensors.values():
            tensor.add_(1.0)
        self._kept.copy_(self.tensors[self._first])

    def train(self) -> None:
        """Changes the first tensor, as the update after a save would."""
        self.tensors[self._first].mul_(2.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def check(self) -> None:
        """Compares what was loaded with what was to be saved, and undoes `train`."""
        self.tensors[self._first].copy_(self._kept)
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, self.target[name]), name
            self.target[name].zero_()


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


def _raw(options: argparse.Namespace, rank: int, timed: _Timed) -> None:
    file = options.dir / f"raw-{rank}"
    timed("raw_write", lambda: _write_raw(file, options.mib << 20))
    timed("raw_read", lambda: _read_raw(file))
    file.unlink()


def _ours(saver: Saver, root: Path, groups: Groups, state: _State, timed: _Timed) -> None:
    def begin() -> None:
        saver.begin(state.number, state.tensors, META)
        state.train()

    def load() -> None:
        checkpoint, problems = newest_sound_checkpoint(root, groups)
        assert checkpoint is not None and not problems
        saved = checkpoint.tensors()
        for name, tensor in state.target.items():
            tensor.copy_(saved[name])

    timed("ours_pause", begin)
    timed("ours_commit", saver.settle, after="ours_pause")
    timed("ours_load", load)
    state.check()


def _dcp(
    name: str,
    stager: AsyncStager | None,
    place: Path,
    state: _State,
    group: dist.ProcessGroup,
    timed: _Timed,
) -> None:
    saving: list[Any] = []

    def begin() -> None:
        saving.append(
            dcp.async_save(
                state.tensors, checkpoint_id=place, process_group=group, async_stager=stager
            )
        )
        state.train()

    def load() -> None:
        dcp.load(state.target, checkpoint_id=place, process_group=group)

    timed(f"{name}_pause", begin)
    timed(f"{name}_commit", lambda: saving[0].result(), after=f"{name}_pause")
    _forget(place)
    timed(f"{name}_load", load)
    state.check()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place)
    dist.barrier()


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
    for name in ("dcp", "dcp_pinned"):
        if f"{name}_pause_ms" in row:
            row[f"pause_of_{name}"] = row["ours_pause_ms"] / row[f"{name}_pause_ms"]
    row["save_share_of_disk"] = row["ours_commit_mb_s"] / row["raw_write_mb_s"]
    row["load_share_of_disk"] = row["ours_load_mb_s"] / row["raw_read_mb_s"]
    return row


def _file_system(place: Path) -> str:
    command = ["findmnt", "-n", "-o", "FSTYPE", "-T", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
