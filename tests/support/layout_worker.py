"""One of several processes that torchrun started, which trains one case after another.

Importing torch costs more than a case, so all cases share the processes. Each is the command line
of `nmoe-train` in a world of its own: its first ranks run it as torchrun would have started them,
under a generation of their own in the store, and the others go on to the next case. What a rank
prints, its exit code, and what it computed are written beside the case's run.

Usage: torchrun --nproc-per-node N layout_worker.py CASES.json
"""

import errno
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nmoe_train.checkpoint.folder as checkpoints
import nmoe_train.loop as loop
import nmoe_train.run as run
import nmoe_train.step as step
import torch
import torch.distributed as dist
from nmoe_train.checkpoint import gather_state
from nmoe_train.cli import main
from nmoe_train.model import Transformer
from safetensors.torch import save_file

RANK = int(os.environ["RANK"])


class Died(BaseException):
    """The end of the process, as far as the code under test can tell."""


class Recorder:
    """What this rank started from, computed and ended with, for the test to compare."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.steps: list[dict[str, Any]] = []

    def after(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """The function with this rank's weights written to a file after it."""

        def call(*arguments: Any, **named: Any) -> Any:
            result = real(*arguments, **named)
            model = arguments[0] if result is None else result.model
            state = gather_state(model, torch.optim.SGD(model.parameters()))
            tensors = {key: tensor.contiguous().clone() for key, tensor in state.items()}
            save_file(tensors, self.out.with_name(f"{self.out.name}-{name}.safetensors"))
            return result

        return call

    def step_record(self, real: Callable[..., Any], case: dict[str, Any]) -> Callable[..., Any]:
        """The function with its answer noted, and the case's signal sent after its step."""

        def call(*arguments: Any) -> Any:
            scalars, experts = real(*arguments)
            self.steps.append({**scalars, **experts})
            if case.get("signal") == [RANK, len(self.steps)]:
                os.kill(os.getpid(), signal.SIGTERM)
            return scalars, experts

        return call


def fail_at(patches: ExitStack, rank: int, number: int, error: str) -> None:
    """Lets one rank fail before the n-th write or flush of its checkpoints that lasts.

    error: "dies" as if by SIGKILL, or "full" as by a disk without space.
    """
    left, remove = number, shutil.rmtree

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *content: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0 and error == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if left == 0:
                raise Died
            real(path, *content)

        return call

    def remove_unless_dead(*arguments: Any, **named: Any) -> None:
        # The dead clean nothing up.
        if left > 0 or error == "full":
            remove(*arguments, **named)

    if rank == RANK:
        patches.enter_context(patch.object(shutil, "rmtree", remove_unless_dead))
        for name in ("_save_tensors", "sync_path", "atomic_write"):
            function = counted(getattr(checkpoints, name))
            patches.enter_context(patch.object(checkpoints, name, function))


def corrupt_at(patches: ExitStack, rank: int, number: int) -> None:
    """Changes the last bit of one gradient of a rank, once those of a step are added up."""
    real, left = step.reduce_step, number

    def reduce(model: Any, *arguments: Any) -> Any:
        nonlocal left
        result = real(model, *arguments)
        left -= 1
        if left == 0 and rank == RANK:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return result

    patches.enter_context(patch.object(step, "reduce_step", reduce))


def slow_down(patches: ExitStack, rank: int, seconds: float) -> None:
    """Lets one rank take longer in every forward pass."""
    real = Transformer.part

    def part(*arguments: Any) -> Any:
        time.sleep(seconds)
        return real(*arguments)

    if rank == RANK:
        patches.enter_context(patch.object(Transformer, "part", part))


def train(case: dict[str, Any], recorder: Recorder) -> int | str:
    """Runs a case on this rank; its exit code, or the name of what escaped."""
    with ExitStack() as patches:
        for module, name, function in (
            (loop, "initialise", recorder.after("initial", loop.initialise)),
            (loop, "step_record", recorder.step_record(loop.step_record, case)),
            (run, "train", recorder.after("final", run.train)),
            (run, "GENERATED_TOKENS", 4),
            (sys, "argv", ["nmoe-train", "run", *case["arguments"]]),
        ):
            patches.enter_context(patch.object(module, name, function))
        if "slow" in case:
            slow_down(patches, *case["slow"])
        if "corrupt" in case:
            corrupt_at(patches, *case["corrupt"])
        if "fail" in case:
            fail_at(patches, *case["fail"])
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except Died as error:
            return type(error).__name__
        except BaseException as error:
            # Nobody foresaw it: the test must be able to show where it came from.
            traceback.print_exc()
            return type(error).__name__
    return 0


def world(number: int, processes: int) -> None:
    """Makes the environment that of a torchrun of so many processes, after other ones."""
    sizes = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {name: str(size) for name, size in sizes.items()}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)


def run_case(number: int, case: dict[str, Any], folder: Path) -> None:
    """Runs one case on this rank, with all that is printed in a file."""
    out = folder / f"{case['name']}-{RANK}"
    recorder = Recorder(out)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with out.with_suffix(".txt").open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        world(number, case["processes"])
        code = train(case, recorder)
        sys.stdout.flush()
        sys.stderr.flush()
    for descriptor, before in zip((1, 2), kept, strict=True):
        os.dup2(before, descriptor)
        os.close(before)
    # Models are cycles, and errors hold what their frames held: without this, groups and their
    # threads stay beside those of later cases.
    gc.collect()
    if dist.is_initialized():
        # A process that fails leaves this to its end.
        dist.destroy_process_group()
    out.with_suffix(".json").write_text(json.dumps({"code": code, "steps": recorder.steps}))


if __name__ == "__main__":
    # A crash in native code says where Python was, in what the rank has printed.
    faulthandler.enable()
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    for number, case in enumerate(json.loads(file.read_text())):
        if case["processes"] > RANK:
            run_case(number, case, file.parent)
