"""The ways rows travel between ranks: `local`, `collective`, `p2p`, `nvshmem`.

`open_transport` takes the one that is asked for, or the first that fits: local for a group of one,
p2p for GPUs of one host, nvshmem for GPUs of several, collective for CPUs. If none of them can run,
that is an error with the reasons, never replaced in silence.
"""

import importlib
import importlib.util
from typing import Any

import torch.distributed as dist

from nmoe_kernels.errors import KernelError
from nmoe_kernels.rdep.counters import Tally
from nmoe_kernels.rdep.settings import Settings, TransportName
from nmoe_kernels.rdep.transports.announce import carries_host_tensors
from nmoe_kernels.rdep.transports.collective import Collective
from nmoe_kernels.rdep.transports.contract import Delivery, Shape, Transport
from nmoe_kernels.rdep.transports.local import Local

__all__ = ["Delivery", "Shape", "Transport", "open_transport", "why_unusable"]


def open_transport(
    settings: Settings, shape: Shape, group: dist.ProcessGroup | None, tally: Tally
) -> Transport:
    """Opens a transport on every rank of the group. group: None for a single rank.

    Raises KernelError (E-RDEP-TRANSPORT) with the reason when the transport cannot run.
    """
    candidates = (settings.transport,) if settings.transport else _candidates(shape)
    reasons = []
    for name in candidates:
        reason = why_unusable(name, shape, group)
        if reason is None:
            return _open(name, settings, shape, group, tally)
        reasons.append(f"transport {name!r} cannot run here: {reason}")
    remedy = "mend that, or set rdep.transport to 'collective', which needs least"
    raise KernelError("E-RDEP-TRANSPORT", ", and ".join(reasons), remedy)


def why_unusable(name: TransportName, shape: Shape, group: dist.ProcessGroup | None) -> str | None:
    """Why a transport cannot serve this group, or None if it can."""
    if name == "local":
        return None if shape.ranks == 1 else f"it is for one rank, and there are {shape.ranks}"
    if group is None:
        return "it needs a process group, and there is none"
    if name == "collective":
        if carries_host_tensors(group):
            return None
        backends = dist.get_backend_config(group)
        return (
            f"it needs a group with 'cpu:gloo,cuda:nccl' as backend, and this one has {backends!r}"
        )
    if shape.device.type != "cuda":
        return f"it runs on cuda, not on {shape.device.type}"
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        return "this version does not have it"
    reason: str | None = _one_sided(name).why_unusable(shape, group)
    return reason


def _candidates(shape: Shape) -> tuple[TransportName, ...]:
    """What fits a group, the preferred one first. `collective` is never a GPU's second choice."""
    if shape.ranks == 1:
        return ("local",)
    return ("p2p", "nvshmem") if shape.device.type == "cuda" else ("collective",)


def _open(
    name: TransportName,
    settings: Settings,
    shape: Shape,
    group: dist.ProcessGroup | None,
    tally: Tally,
) -> Transport:
    if group is None or name == "local":
        return Local(shape, tally)
    if name == "collective":
        return Collective(shape, f"{settings.capacity} {settings.keep}", group, tally)
    transport: Transport = _one_sided(name).open_transport(shape, group, tally)
    return transport


def _one_sided(name: TransportName) -> Any:
    """The module of p2p or nvshmem, imported when asked for: both need a GPU's libraries."""
    return importlib.import_module(f"{__name__}.{name}")
