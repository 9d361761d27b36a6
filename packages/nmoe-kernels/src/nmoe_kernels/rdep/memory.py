"""Memory of a rank that its peers may write: areas for rows, ids, weights and counts, and flags.

One allocation of torch's symmetric memory holds everything, so that a peer's part is its base plus
an offset that is the same on every rank. It belongs to the object that made it, and is freed when
the object goes.

Letters: R ranks, T_max most tokens of a rank, K slots, H width, C chunks in which results return.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from nmoe_kernels.hardware import dtype_name
from nmoe_kernels.rdep.protocol import AREAS
from nmoe_kernels.rdep.transports.contract import Shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 256
"""Bytes to which parts are aligned: more than any vector store needs."""
MOST_CHUNKS, CHUNK_TOKENS = 8, 512
"""How results are cut: a flag costs as much time as a few hundred rows."""


@dataclass(frozen=True)
class Parts:
    """Offsets in bytes, by area, of the rows [R, T_max, H], the ids and the weights [R, T_max, K]
    and the counts [R]; of the flags [C, R]; and the size of it all.
    """

    rows: tuple[int, ...]
    ids: tuple[int, ...]
    weights: tuple[int, ...]
    counts: tuple[int, ...]
    flags: int
    size: int

    def staging(self, area: int) -> int:
        """Bytes from an area to the staging area, the last."""
        return self.rows[-1] - self.rows[area]


def chunks_of(shape: Shape) -> int:
    """C, by which results that have come are summed while others come; 1 for few tokens."""
    return max(1, min(MOST_CHUNKS, shape.tokens_max // CHUNK_TOKENS))


def lay_out(shape: Shape, staged: bool = False) -> Parts:
    """Where everything lies, in a rank's symmetric memory; the same on all ranks.

    staged: with one more area, in which a rank lays out what it sends.
    """
    used = 0

    def part(numbers: int, itemsize: int) -> int:
        nonlocal used
        start = used
        used = -(-(start + numbers * itemsize) // ALIGNMENT) * ALIGNMENT
        return start

    segment_rows = shape.ranks * shape.tokens_max
    areas: list[tuple[int, int, int, int]] = []
    # Area after area, so that all parts of one are equally far from those of another.
    for _ in range(AREAS + staged):
        rows = part(segment_rows * shape.width, shape.dtype.itemsize)
        ids, weights = (part(segment_rows * shape.slots, 4) for _ in range(2))
        areas.append((rows, ids, weights, part(shape.ranks, 8)))
    flags = part(chunks_of(shape) * shape.ranks, 8)
    all_rows, all_ids, all_weights, counts = zip(*areas, strict=True)
    return Parts(all_rows, all_ids, all_weights, counts, flags, used)


def misfit(shape: Shape, group: dist.ProcessGroup) -> str | None:
    """Why these ranks cannot have such memory together, or None; all ranks ask."""
    told: list[tuple[object, ...]] = [()] * shape.ranks
    dist.all_gather_object(told, shape.sizes, group=group)
    if len(set(told)) > 1:
        return "its ranks were opened with different sizes"
    return None if shape.dtype in DTYPES else f"rows of {dtype_name(shape.dtype)} are not moved"


class SymmetricMemory:
    """One allocation per rank, mapped by all: `bases` int64 [R] holds every rank's address.

    Made by all ranks of the group together.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup, staged: bool = False) -> None:
        self.parts = lay_out(shape, staged)
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
