"""A copy of a rank's tensors in host memory: the only time that a save takes from the training.

The buffer stays from one save to the next, so that host memory is flat. On CUDA its pages are
locked, and copies are queued without waiting for each. Tensors that lie one after another in
memory, as the experts of a stack do, are copied at once: a state has thousands of them.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 16


@dataclass
class _Run:
    """Tensors without gaps between them: their names, and the bytes of all."""

    names: list[str]
    bytes_N: Tensor


class HostSnapshot:
    """Host memory for copies of the same tensors, again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors; what is returned stays valid until the next call."""
        runs = list(_runs(tensors))
        self._make_room(sum(_padded(run.bytes_N.numel()) for run in runs))
        copies: dict[str, Tensor] = {}
        start = 0
        for run in runs:
            copy = self._buffer[start : start + run.bytes_N.numel()]
            copy.copy_(run.bytes_N, non_blocking=True)
            start += _padded(copy.numel())
            for name in run.names:
                tensor = tensors[name]
                size = tensor.numel() * tensor.element_size()
                copies[name] = copy[:size].view(tensor.dtype).view(tensor.shape)
                copy = copy[size:]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return {name: copies[name] for name in tensors}

    def close(self) -> None:
        """Gives the memory back."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _make_room(self, size: int) -> None:
        if self._buffer.numel() >= size:
            return
        self.close()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if self._device.type == "cuda":
            # torch's own pinned memory comes in powers of two, which would double it.
            runtime = torch.cuda.cudart()
            answer = runtime.cudaHostRegister(self._buffer.data_ptr(), size, 0)
            self._pinned = answer == runtime.cudaError.success
            if not self._pinned:
                log.warning(
                    "checkpoint: %.1f GiB of host memory cannot be pinned (%s), so saves pause "
                    "longer; raise the limit of locked memory",
                    size / 2**30,
                    answer,
                )


def _runs(tensors: Mapping[str, Tensor]) -> Iterator[_Run]:
    """The tensors in as few runs as they lie in memory."""
    pending: list[str] = []
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        if pending and not _follows(tensors[pending[-1]], tensors[name]):
            yield _run(pending, tensors)
            pending = []
        pending.append(name)
    if pending:
        yield _run(pending, tensors)


def _follows(before: Tensor, tensor: Tensor) -> bool:
    size = before.numel() * before.element_size()
    return (
        before.is_contiguous()
        and tensor.is_contiguous()
        and before.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and before.data_ptr() + size == tensor.data_ptr()
        # Views of the copy must start where their type may.
        and before.dtype == tensor.dtype
    )


def _run(names: list[str], tensors: Mapping[str, Tensor]) -> _Run:
    """All bytes of tensors that follow each other, sharing their memory where it has no gaps."""
    first = tensors[names[0]].detach()
    if not first.is_contiguous():
        first = first.contiguous()
    start = first.storage_offset() * first.element_size()
    size = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    raw.set_(first.untyped_storage(), start, (size,), (1,))
    return _Run(list(names), raw)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
