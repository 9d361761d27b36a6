"""How each product of the Triton backend is cut and launched: measured defaults, or a tuned choice.

`nmoe-kernels tune` times the candidates below on this GPU for one layer's sizes and keeps the best
in a file per GPU and version, which `launch_for` reads once. NMOE_KERNELS_TUNING names another
file, or is "off" to use the defaults. Nothing is timed or chosen while a model runs.

Letters: N columns of the output, C inner dimension.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from nmoe_kernels.errors import KernelError

logger = logging.getLogger("nmoe_kernels")

Product = Literal["up", "down", "grad_a", "grad_x", "grad_down", "grad_gate_up"]
TUNING_VARIABLE = "NMOE_KERNELS_TUNING"
# Raised when kernels change so that old measurements say nothing.
VERSION = 1


@dataclass(frozen=True)
class Launch:
    """columns: of an output tile (gate and up together in `up`). inner: of a step. group: row tiles
    that share weight tiles in L2. halves: the output tile is stored in two, which needs less shared
    memory.
    """

    columns: int = 256
    inner: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 8
    halves: bool = False


# The first of each is the default: the fastest of those measured on an H200 at most shapes.
CANDIDATES: dict[Product, tuple[Launch, ...]] = {
    "up": (Launch(), Launch(group=4), Launch(group=16)),
    "down": (Launch(), Launch(halves=True), Launch(stages=4, halves=True), Launch(group=16)),
    "grad_a": (Launch(halves=True), Launch(stages=4, halves=True), Launch(), Launch(group=16)),
    "grad_x": (Launch(halves=True), Launch(stages=4, halves=True), Launch(), Launch(group=16)),
    "grad_down": (Launch(), Launch(group=4), Launch(group=16)),
    "grad_gate_up": (Launch(), Launch(group=4), Launch(group=16)),
}
FORCED: dict[Product, Launch] = {}
"""What `forced` asks for now."""


def launch_for(product: Product, inner: int, columns: int, device: torch.device) -> Launch:
    """The launch of a product with C summed over and N columns of the result, on a device.

    For the gradients of weights, C stands for the rows of the result.
    """
    launch = FORCED.get(product)
    if launch is not None:
        return launch
    if device.type != "cuda":
        return CANDIDATES[product][0]
    return _tuned(device).get(entry(product, inner, columns), CANDIDATES[product][0])


@contextmanager
def forced(product: Product, launch: Launch) -> Iterator[None]:
    """Launches a product this way inside the context, whatever was tuned; to tune and to test.

    In all threads, since autograd runs a backward in one of its own; for a product, only one thread
    at a time may be inside.
    """
    before = FORCED.get(product)
    FORCED[product] = launch
    try:
        yield
    finally:
        if before is None:
            del FORCED[product]
        else:
            FORCED[product] = before


def entry(product: Product, inner: int, columns: int) -> str:
    """The name of a product of these sizes in the file."""
    return f"{product} {inner}x{columns}"


def remember(chosen: dict[str, Launch], device: torch.device) -> Path:
    """Adds choices, by `entry`, to the file of this GPU; returns its path.

    Raises KernelError E-TUNING-OFF if tuning is turned off, E-TUNING-FILE if it cannot be written.
    """
    path = tuning_file(device)
    if path is None:
        raise KernelError("E-TUNING-OFF", f"{TUNING_VARIABLE} is off", "unset it to tune")
    content = {name: asdict(launch) for name, launch in (_read(path) | chosen).items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        partial.replace(path)
    except OSError as error:
        raise KernelError(
            "E-TUNING-FILE", f"{path}: {error.strerror}", f"name another in {TUNING_VARIABLE}"
        ) from error
    _tuned.cache_clear()
    return path


def tuning_file(device: torch.device) -> Path | None:
    """Where the choices for a GPU lie; None if tuning is turned off."""
    named = os.environ.get(TUNING_VARIABLE, "")
    if named:
        return None if named == "off" else Path(named)
    gpu = torch.cuda.get_device_name(device).replace(" ", "-").lower()
    return cache_folder() / f"launches-{gpu}-{VERSION}.json"


def cache_folder() -> Path:
    """Where this package keeps what it found out or compiled, of one user."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "nmoe-kernels"


@cache
def _tuned(device: torch.device) -> dict[str, Launch]:
    path = tuning_file(device)
    found = {} if path is None else _read(path)
    if found:
        logger.info("experts: %d tuned launches from %s", len(found), path)
    return found


def _read(path: Path) -> dict[str, Launch]:
    """Raises KernelError E-TUNING-FILE when the file is not what `remember` writes."""
    if not path.is_file():
        return {}
    try:
        return {name: Launch(**fields) for name, fields in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise KernelError(
            "E-TUNING-FILE", f"{path} cannot be read: {error}", "remove it, and tune again"
        ) from error
