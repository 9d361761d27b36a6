"""Runs functions on groups of ranks: real processes over gloo.

One process imports torch and forks all ranks of all groups, so that the import is paid once. Each
rank saves what its function returned, or the error it raised; a rank that was killed saves nothing.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nmoe_kernels import KernelError

# Only a guard against a hang: far above what any group takes on a busy machine.
LIMIT_S = 400


@dataclass
class Group:
    """`function` of the module `rdep_cases`, on so many ranks, called with rank and arguments."""

    function: str
    ranks: int
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Refusal:
    """A KernelError that a rank raised."""

    code: str
    message: str


def run_groups(folder: Path, groups: dict[str, Group]) -> dict[str, list[Any]]:
    """What each rank of each group returned: a value, a Refusal, or None for one that died."""
    torch.save(groups, folder / "groups.pt")
    command = [sys.executable, __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {}
    for name, group in groups.items():
        files = [folder / name / f"{rank}.pt" for rank in range(group.ranks)]
        results[name] = [
            torch.load(file, weights_only=False) if file.exists() else None for file in files
        ]
    return results


def serve(folder: Path) -> int:
    """Forks every rank of every group and waits; 1 if one failed by another error than ours."""
    groups = torch.load(folder / "groups.pt", weights_only=False)
    fork = multiprocessing.get_context("fork")
    processes = []
    for name, group in groups.items():
        (folder / name).mkdir()
        for rank in range(group.ranks):
            process = fork.Process(target=run_rank, args=(folder / name, rank, group))
            process.start()
            processes.append(process)
    for process in processes:
        process.join()
    return int(any(process.exitcode == 1 for process in processes))


def run_rank(folder: Path, rank: int, group: Group) -> None:
    """One rank: joins its group, runs the function, saves its answer."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), group.ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=group.ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    function = getattr(importlib.import_module("rdep_cases"), group.function)
    try:
        answer = function(rank, folder=folder, **group.arguments)
    except KernelError as error:
        answer = Refusal(error.code, str(error))
    torch.save(answer, folder / f"{rank}.tmp")
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
    # A peer may still be reading from this process; leaving at once is part of what is tested.
    os._exit(0)


if __name__ == "__main__":
    # Under its own name, so that what is saved here can be loaded by the tests.
    module = importlib.import_module("rdep_ranks")
    importlib.import_module("rdep_cases")
    sys.exit(module.serve(Path(sys.argv[1])))
