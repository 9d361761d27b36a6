"""What this machine can do, and which backend that leads to.

`describe` says once what is installed and which GPUs there are. `pick_backend` chooses the first
usable backend in order of preference, unless one is forced by argument or by the environment
variable NMOE_KERNELS_BACKEND; a forced backend that cannot run is an error, never replaced in
silence.
"""

import ctypes
import importlib.metadata
import logging
import os
import platform
import re
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from nmoe_kernels.errors import KernelError

logger = logging.getLogger("nmoe_kernels")

BACKENDS = ("cute", "triton", "torch", "reference")
"""Names of the backends, the preferred one first."""

FUSED = ("cute", "triton")
"""Those whose router and rows are Triton kernels."""

CUTE_RELEASES = {"quack-kernels": "0.3.11", "nvidia-cutlass-dsl": "4.4.2"}
"""What `gemm/cute.py` is written for and was measured with; the extra `cute` brings them."""

BACKEND_VARIABLE = "NMOE_KERNELS_BACKEND"

# Packages whose needs are compared with what is installed: ours, and those that pin each other.
WATCHED = (
    "nmoe-kernels",
    "torch",
    "sonic-moe",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "liger-kernel",
)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: its name, compute capability, and memory in GiB."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class Hardware:
    """Versions ("" when absent), CUDA devices, and pairs of packages or drivers that do not fit."""

    python: str
    torch: str
    triton: str
    cuda_runtime: str
    cuda_driver: str
    gpus: tuple[Gpu, ...]
    clashes: tuple[str, ...]


@cache
def describe() -> Hardware:
    """What this machine has, looked up once per process."""
    driver, runtime, gpus = _driver_version(), torch.version.cuda or "", _gpus()
    built_for = torch.cuda.get_arch_list() if gpus else []
    return Hardware(
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed("triton"),
        cuda_runtime=runtime,
        cuda_driver=driver,
        gpus=gpus,
        clashes=(
            *_package_clashes(),
            *_driver_clashes(driver, runtime),
            *_gpu_clashes(gpus, built_for),
        ),
    )


def why_unusable(backend: str, device: str, dtype: torch.dtype) -> str | None:
    """Why a backend cannot compute `dtype` on a device type ("cpu", "cuda"), or None if it can."""
    if backend == "reference":
        return None
    if backend == "cute":
        return _triton_refusal(device, dtype) or _quack_refusal()
    if backend == "triton":
        return _triton_refusal(device, dtype)
    return _grouped_mm_refusal(device, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@torch.compiler.assume_constant_result
def pick_backend(requested: str | None, device: str, dtype: torch.dtype) -> str:
    """The name of the backend for `dtype` on a device type, logged the first time it is picked.

    requested: a forced choice; None asks NMOE_KERNELS_BACKEND, then takes the first usable one.
    Raises KernelError: E-BACKEND-UNKNOWN, or E-BACKEND-UNAVAILABLE with the reason.
    """
    forced = requested or os.environ.get(BACKEND_VARIABLE) or None
    if forced is None:
        usable = (name for name in BACKENDS if why_unusable(name, device, dtype) is None)
        return _announce(next(usable), device, dtype, "first usable")
    source = "asked for" if requested else f"set by {BACKEND_VARIABLE}"
    if forced not in BACKENDS:
        what = f"backend {forced!r} ({source}) does not exist"
        raise KernelError("E-BACKEND-UNKNOWN", what, f"choose one of {', '.join(BACKENDS)}")
    reason = why_unusable(forced, device, dtype)
    if reason is not None:
        what = f"backend {forced!r} ({source}) cannot run here: {reason}"
        raise KernelError(
            "E-BACKEND-UNAVAILABLE", what, "choose another, or none to let it be picked"
        )
    return _announce(forced, device, dtype, source)


@cache
def _triton_refusal(device: str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run: they hold tiles of 16-bit floats in 213 KB of a Hopper."""
    if not installed("triton"):
        return "triton is not installed"
    if device != "cuda":
        return f"it runs on cuda, not on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, not {dtype_name(dtype)}"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU here"
    major = torch.cuda.get_device_capability()[0]
    if major not in (9, 10):
        return f"it needs the shared memory of capability 9.0 or 10.0, and this GPU has {major}.x"
    return None


@cache
def _quack_refusal() -> str | None:
    """Why QuACK's kernels cannot run where Triton's can."""
    for package, release in CUTE_RELEASES.items():
        found = installed(package)
        if found != release:
            have = f"is {found} here" if found else "is not installed"
            return f"it needs {package} {release}, which {have}: pip install nmoe-kernels[cute]"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"its launches are those of capability 9.0, and this GPU has {major}.{minor}"
    return None


@cache
def _grouped_mm_refusal(device: str, dtype: torch.dtype) -> str | None:
    """What grouped_mm says to the smallest product; which types it takes differs by release."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    try:
        rows = torch.zeros(16, 16, dtype=dtype, device=device)
        ends = torch.full((1,), 16, dtype=torch.int32, device=device)
        F.grouped_mm(rows, rows.unsqueeze(0).mT, offs=ends)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as refusal:
        return str(refusal).splitlines()[0]
    return None


@cache
def _announce(backend: str, device: str, dtype: torch.dtype, source: str) -> str:
    logger.info("experts: backend %s for %s on %s (%s)", backend, dtype_name(dtype), device, source)
    return backend


def installed(package: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, (p.major, p.minor), p.total_memory / 2**30) for p in found)


def _driver_version() -> str:
    """The newest CUDA that the driver serves, as "13.2"; asking it makes no CUDA context."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _package_clashes() -> list[str]:
    """Installed packages that another installed one wants in another version."""
    return [
        f"{owner} wants {name} {wanted.removeprefix('==')}, {have} is installed"
        for owner in WATCHED
        for name, wanted in map(_split_requirement, _requirements(owner))
        if (have := installed(name)) and not _fits(have, wanted)
    ]


def _requirements(package: str) -> list[str]:
    """What an installed package needs without its extras; nothing for one that is absent."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [line for line in lines if "extra ==" not in line]


def _split_requirement(line: str) -> tuple[str, str]:
    """ "name[extra]>=1,<2; marker" -> ("name", ">=1,<2")."""
    found = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", line)
    return (found[1], found[2].replace(" ", "")) if found else ("", "")


def _fits(have: str, wanted: str) -> bool:
    """Whether a version meets all clauses of a specifier, by its numbers (no "rc", no "+cu130")."""
    clauses = re.findall(r"(==|!=|>=|<=|~=|<|>)([\w.+]+?)(\.\*)?(?:,|$)", wanted)
    return all(_meets(_numbers(have), sign, _numbers(want), star) for sign, want, star in clauses)


def _meets(have: list[int], sign: str, want: list[int], star: str) -> bool:
    """Whether one version meets one clause; `star`: only the numbers that are given count."""
    width = max(len(have), len(want))
    left, right = (numbers + [0] * (width - len(numbers)) for numbers in (have, want))
    same = left[: len(want)] == want if star else left == right
    return {
        "==": same,
        "!=": not same,
        ">=": left >= right,
        "<=": left <= right,
        "<": left < right,
        ">": left > right,
        "~=": left >= right and left[: len(want) - 1] == want[:-1],
    }[sign]


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else []


def _driver_clashes(driver: str, runtime: str) -> list[str]:
    """CUDA runs with an older driver of the same major version, not with one of an older major."""
    if driver and not runtime:
        return [f"the driver serves CUDA {driver}, and torch was built without CUDA"]
    if driver and runtime and int(driver.split(".")[0]) < int(runtime.split(".")[0]):
        return [f"torch was built for CUDA {runtime}, the driver serves up to {driver}"]
    return []


def _gpu_clashes(gpus: tuple[Gpu, ...], built_for: list[str]) -> list[str]:
    """GPUs for which torch holds neither machine code nor code that the driver can compile.

    built_for: "sm_90" runs on capabilities 9.0 and later of that major, "compute_90" on all later.
    """
    return [
        f"torch has no code for {gpu.name} (capability {'.'.join(map(str, gpu.capability))})"
        for gpu in dict.fromkeys(gpus)
        if not any(_runs_on(gpu.capability, target) for target in built_for)
    ]


def _runs_on(capability: tuple[int, int], target: str) -> bool:
    found = re.match(r"(sm|compute)_(\d+)(\d)([af]?)$", target)
    if found is None:
        return False
    built = (int(found[2]), int(found[3]))
    if found[4] == "a":
        return capability == built
    same_major = found[1] == "sm" or found[4] == "f"
    return capability >= built and (not same_major or capability[0] == built[0])
