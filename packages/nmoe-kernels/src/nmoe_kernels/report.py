"""The tables that `nmoe-kernels doctor` prints: what `hardware` found, for people."""

import torch
from rich.table import Table

from nmoe_kernels.hardware import BACKENDS, describe, dtype_name, why_unusable

CHECKED = (torch.float32, torch.bfloat16)


def machine_table() -> Table:
    """Versions and devices, a row each."""
    machine = describe()
    table = Table("part", "found")
    for name in ("python", "torch", "triton", "cuda_runtime", "cuda_driver"):
        table.add_row(name.replace("_", " "), getattr(machine, name) or "none")
    for gpu in machine.gpus:
        capability = ".".join(map(str, gpu.capability))
        table.add_row("gpu", f"{gpu.name}, capability {capability}, {gpu.memory_gib:.0f} GiB")
    if not machine.gpus:
        table.add_row("gpu", "none")
    return table


def backend_table() -> Table:
    """Each backend on each device type of this machine, and why where it is not usable."""
    devices = ("cpu", "cuda") if describe().gpus else ("cpu",)
    table = Table("backend", "device", *(dtype_name(dtype) for dtype in CHECKED))
    for backend in BACKENDS:
        for device in devices:
            reasons = (why_unusable(backend, device, dtype) for dtype in CHECKED)
            table.add_row(backend, device, *(reason or "usable" for reason in reasons))
    return table
