"""How long the first forward and backward take: compiling and tuning, with caches empty and full.

Each call is a process of its own, and all caches that compilers are known to keep are sent to one
folder, empty for the first process and as the first has left it for the second. The clock runs from
when the inputs are on the device and the modules are loaded to the end of the backward.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from nmoe_kernels.bench.measure import Contender
from nmoe_kernels.bench.moe import layer_contender
from nmoe_kernels.bench.problem import layer_problem
from nmoe_kernels.bench.router import router_contender, router_problem
from nmoe_kernels.bench.shapes import RouterShape, Shape

CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "QUACK_HOME",
    "CUTE_DSL_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)
LIMIT_S = 420.0


def first_calls(
    kind: str, shape: str, routing: str, dtype: str, device: str, name: str
) -> tuple[float, float] | str:
    """Seconds of a first call with empty caches and with full ones, or why there are none.

    kind: "moe" or "router". shape: its numbers. name: a contender.
    """
    with tempfile.TemporaryDirectory(prefix="nmoe-first-call-") as folder:
        caches = {variable: f"{folder}/{variable.lower()}" for variable in CACHES}
        for cache in caches.values():
            Path(cache).mkdir()
        command = [sys.executable, "-m", __name__, kind, shape, routing, dtype, device, name]
        seconds = []
        for _ in range(2):
            answer = _run(command, {**os.environ, **caches})
            if isinstance(answer, str):
                return answer
            seconds.append(answer)
    return seconds[0], seconds[1]


def _run(command: list[str], environment: dict[str, str]) -> float | str:
    """The seconds that the child measured, or why it did not."""
    child = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"the first call took longer than {LIMIT_S:.0f} s"
    finally:
        # Compilers start workers of their own, which would outlive the child.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return f"the first call failed ({child.returncode}): {last}"
    return float(json.loads(out.splitlines()[-1])["seconds"])


def _contender(
    kind: str, shape: str, routing: str, dtype: str, device: str, name: str
) -> Contender:
    sizes = map(int, shape.split(","))
    options = (routing, getattr(torch, dtype), torch.device(device))
    if kind == "router":
        problem = router_problem(RouterShape(*sizes), *options, "softmax")
        return router_contender(name, problem)
    return layer_contender(name, layer_problem(Shape(*sizes), *options))


def main(kind: str, shape: str, routing: str, dtype: str, device: str, name: str) -> None:
    """The child: sets up one contender and writes the seconds of its first call as JSON."""
    contender = _contender(kind, shape, routing, dtype, device, name)
    if contender.absent:
        sys.exit(contender.absent)
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    contender.passes["both"]()
    if device == "cuda":
        torch.cuda.synchronize()
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - start_s}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
