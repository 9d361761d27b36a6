"""Memory of a rank that its peers may write: areas for rows, ids, weights and counts, and flags.

One allocation of torch's symmetric memory holds everything, so that a peer's part is its base plus
an offset that is the same on every rank. It belongs to the object that made it, and is freed when
the object goes.

Letters: R ranks, T_max most tokens of a rank, K slots, H width.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from nmoe_kernels.rdep.protocol import AREAS
from nmoe_kernels.rdep.transports.contract import Shape

ALIGNMENT = 256
"""Bytes to which parts are aligned: more than any vector store needs."""


@dataclass(frozen=True)
class Parts:
    """Offsets in bytes, by area, of the rows [R, T_max, H], the ids and the weights [R, T_max, K]
    and the counts [R]; of the flags [R]; and the size of it all.
    """

    rows: tuple[int, ...]
    ids: tuple[int, ...]
    weights: tuple[int, ...]
    counts: tuple[int, ...]
    flags: int
    size: int


def lay_out(shape: Shape) -> Parts:
    """Where everything lies, in a rank's symmetric memory; the same on all ranks."""
    used = 0

    def part(numbers: int, itemsize: int) -> int:
        nonlocal used
        start = used
        used = -(-(start + numbers * itemsize) // ALIGNMENT) * ALIGNMENT
        return start

    segment_rows = shape.ranks * shape.tokens_max
    areas = range(AREAS)
    return Parts(
        rows=tuple(part(segment_rows * shape.width, shape.dtype.itemsize) for _ in areas),
        ids=tuple(part(segment_rows * shape.slots, 4) for _ in areas),
        weights=tuple(part(segment_rows * shape.slots, 4) for _ in areas),
        counts=tuple(part(shape.ranks, 8) for _ in areas),
        flags=part(shape.ranks, 8),
        size=used,
    )


class SymmetricMemory:
    """One allocation per rank, mapped by all: `bases` int64 [R] holds every rank's address.

    Made by all ranks of the group together.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        self.parts = lay_out(shape)
        self._bytes = symmetric.empty(self.parts.size, dtype=torch.uint8, device=shape.device)
        self._bytes.zero_()
        self._mapping = symmetric.rendezvous(self._bytes, group)
        pointers = self._mapping.buffer_ptrs
        self.bases = torch.tensor(pointers, dtype=torch.int64, device=shape.device)
        torch.cuda.synchronize(shape.device)
        # Nobody writes before every rank has cleared its flags.
        dist.barrier(group)

    def view(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's part at an offset, as a tensor."""
        count = torch.Size(sizes).numel() * dtype.itemsize
        return self._bytes[offset : offset + count].view(dtype).view(sizes)
