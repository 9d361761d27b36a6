"""Where rows lie for the kernels: sorted by expert, each expert's run padded to whole tiles.

A tile of TILE_ROWS rows then belongs to one expert, so that our kernels move whole tiles and need
no mask: a padding row has token -1, is read as zeros and adds nothing to any product. (QuACK's want
no padding: tiles of one row, of which nothing more is said.) Three launches, no atomics and no host
read: every block counts its assignments per expert, every expert sums the counts of the blocks
before, and every block places its assignments, stably. Nothing past the last tile is written or
read.

Letters: T tokens, K experts per token, E experts, M = T*K assignments, P rows (a bound: M,
and a tile of padding per expert unless tiles are of one row), N tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
# Elements of the [block, experts] tile that counts a block.
COUNTED = 16384


class RowPlan(NamedTuple):
    """token_P: int32, row -> t, or -1. flat_P: int32, row -> t*K + k, or -1. inverse_TK: int32,
    (t, k) -> row, or -1 if the assignment belongs to no expert. offsets_E1: int32 [E + 1], rows of
    expert e are offsets[e] to offsets[e + 1], and those from ends[e] (int32 [E]) on are padding.
    tile_expert_N: int32, tile -> e. tiles: int32 [1]. With tiles of one row, flat_P and
    tile_expert_N are empty.
    """

    token_P: Tensor
    flat_P: Tensor
    inverse_TK: Tensor
    offsets_E1: Tensor
    ends_E: Tensor
    tile_expert_N: Tensor
    tiles: Tensor


def plan_rows(
    ids_TK: Tensor, experts: int, assignments: int | None = None, tile_rows: int = TILE_ROWS
) -> RowPlan:
    """Plans the rows of [T, K] expert ids on their device; ids outside [0, E) get no row.

    assignments: a bound of the ids in [0, E) where they are fewer than T * K, which bounds P.
    tile_rows: what the run of an expert is padded to a multiple of; with 1 there is no padding.
    """
    most = ids_TK.numel() if assignments is None else min(assignments, ids_TK.numel())
    return RowPlan(*_plan_rows(ids_TK, experts, most, tile_rows))


# An operator of torch, so that torch.compile takes it whole.
@torch.library.custom_op("nmoe_kernels::plan_rows", mutates_args=())
def _plan_rows(
    ids_TK: Tensor, experts: int, most: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    assignments, slots = ids_TK.numel(), ids_TK.shape[1]
    padded_experts = triton.next_power_of_2(experts)
    block = max(16, min(128, COUNTED // padded_experts))
    blocks = triton.cdiv(assignments, block)
    plan = _empty_plan(ids_TK, experts, most, tile_rows)
    counts = plan.tiles.new_empty(max(blocks, 1), padded_experts)
    totals = plan.tiles.new_empty(padded_experts)
    ids = ids_TK.contiguous()
    sizes = {"BLOCK": block, "EXPERTS": padded_experts}
    if blocks:
        count_kernel[(blocks,)](ids, counts, assignments, experts, **sizes)
    scan_kernel[(padded_experts,)](counts, totals, blocks, EXPERTS=padded_experts, CHUNK=1024)
    place_kernel[(max(blocks, experts),)](
        ids, counts, totals, *plan, assignments, experts, slots, TILE=tile_rows, **sizes
    )
    return tuple(plan)


@_plan_rows.register_fake
def _empty_plan(ids_TK: Tensor, experts: int, most: int, tile_rows: int) -> RowPlan:
    """A plan of the right shapes with nothing in it."""
    tiles = most // tile_rows + experts if tile_rows > 1 else 0
    padded = tiles * tile_rows

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TK.device)

    return RowPlan(
        token_P=empty(padded if tile_rows > 1 else most),
        flat_P=empty(padded),
        inverse_TK=empty(*ids_TK.shape),
        offsets_E1=empty(experts + 1),
        ends_E=empty(experts),
        tile_expert_N=empty(tiles),
        tiles=empty(1),
    )


@triton.jit
def count_kernel(
    ids_ptr, counts_ptr, assignments, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """counts[b, e]: assignments of block b that chose expert e."""
    block = tl.program_id(0)
    flat = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + flat, mask=flat < assignments, other=-1)
    columns = tl.arange(0, EXPERTS)
    chosen = (ids[:, None] == columns[None, :]) & (columns < experts)[None, :]
    tl.store(counts_ptr + block * EXPERTS + columns, tl.sum(chosen.to(tl.int32), axis=0))


@triton.jit
def scan_kernel(counts_ptr, totals_ptr, blocks, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Replaces counts[b, e] by the sum over the blocks before b; totals[e]: the whole sum."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        pointers = counts_ptr + block * EXPERTS + expert
        counts = tl.load(pointers, mask=block < blocks, other=0)
        tl.store(pointers, total + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def place_kernel(
    ids_ptr, before_ptr, totals_ptr,
    token_ptr, flat_ptr, inverse_ptr, offsets_ptr, ends_ptr, tile_expert_ptr, tiles_ptr,
    assignments, experts, slots,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Gives every assignment of block b its row; program e also lays out the run of expert e."""
    program = tl.program_id(0)
    columns = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + columns, mask=columns < experts, other=0)
    lengths = tl.cdiv(totals, TILE) * TILE
    starts = tl.cumsum(lengths, 0) - lengths

    flat = program * BLOCK + tl.arange(0, BLOCK)
    inside = flat < assignments
    ids = tl.load(ids_ptr + flat, mask=inside, other=-1)
    chosen = ((ids[:, None] == columns[None, :]) & (columns < experts)[None, :]).to(tl.int32)
    # Programs past the last block only lay out the run of an expert.
    counted = tl.where(program * BLOCK < assignments, experts, 0)
    before = tl.load(before_ptr + program * EXPERTS + columns, mask=columns < counted, other=0)
    row = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + (before + starts)[None, :]), axis=1)
    has_row = tl.sum(chosen, axis=1) > 0
    tl.store(inverse_ptr + flat, tl.where(has_row, row, -1), mask=inside)
    tl.store(token_ptr + row, flat // slots, mask=has_row)
    if TILE > 1:
        tl.store(flat_ptr + row, flat, mask=has_row)

    if program < experts:
        own = columns == program
        start, total = tl.sum(tl.where(own, starts, 0)), tl.sum(tl.where(own, totals, 0))
        stop = start + tl.cdiv(total, TILE) * TILE
        tl.store(offsets_ptr + program, start)
        tl.store(ends_ptr + program, start + total)
        if TILE > 1:
            padding = start + total + tl.arange(0, TILE)
            tl.store(token_ptr + padding, -1, mask=padding < stop)
            tl.store(flat_ptr + padding, -1, mask=padding < stop)
            for tile in range(start // TILE, stop // TILE):
                tl.store(tile_expert_ptr + tile, program)
        if program == experts - 1:
            tl.store(offsets_ptr + experts, stop)
            tl.store(tiles_ptr, stop // TILE)
