"""Checks properties of the Triton row plan for any ids, in Triton's interpreter on the CPU.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. It takes the
number of examples, and ends with hypothesis's report on stderr where a property does not hold.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from nmoe_kernels.gemm import plan as plans
from nmoe_kernels.gemm import tiles as tile_kernels
from nmoe_kernels.gemm.plan import TILE_ROWS, plan_rows

# What new memory of integers holds when torch fills it to be deterministic.
UNWRITTEN = torch.iinfo(torch.int32).max


@st.composite
def ids_and_experts(draw):
    """Ids [T, K] of any spread, some of no expert, and E."""
    experts = draw(st.integers(1, 9))
    slots = draw(st.integers(1, 4))
    tokens = draw(st.sampled_from([0, 1, 5, 32, 33, 90, 150]))
    dtype = draw(st.sampled_from(["int64", "int32"]))
    # A favourite makes runs of more than one tile, and leaves experts without a row.
    favourite = draw(st.integers(-1, experts + 1))
    if draw(st.booleans()):
        ids = np.full((tokens, slots), favourite, dtype)
        ids[::7] = draw(st.integers(0, experts - 1))
        return ids, experts
    elements = st.integers(-1, experts + 1)
    return draw(arrays.arrays(dtype, (tokens, slots), elements=elements)), experts


@settings(max_examples=int(sys.argv[1]), deadline=None, database=None)
@given(ids_and_experts(), st.sampled_from([TILE_ROWS, 1]))
def rows_are_placed(case, size):
    """Every assignment has one row, in stable order, in whole tiles of its expert."""
    ids, experts = case
    slots, flat = ids.shape[1], ids.flatten().tolist()
    plan = plan_rows(torch.from_numpy(ids), experts, tile_rows=size)
    token, expert_of = plan.token_P.tolist(), plan.tile_expert_N.tolist()
    own = [[i for i, e in enumerate(flat) if e == expert] for expert in range(experts)]
    tiles = [-(-len(members) // size) for members in own]
    starts = [sum(tiles[:e]) * size for e in range(experts + 1)]

    assert plan.offsets_E1.tolist() == starts
    assert plan.ends_E.tolist() == [
        start + len(members) for start, members in zip(starts, own, strict=False)
    ]
    assert plan.tiles.tolist() == [sum(tiles)]
    # Which expert a tile of one row belongs to is left out.
    laid = [e for e in range(experts) for _ in range(tiles[e])] if size > 1 else []
    assert expert_of[: len(laid)] == laid
    wanted = [-1] * (sum(tiles) * size)
    inverse = [-1] * len(flat)
    for start, members in zip(starts, own, strict=False):
        wanted[start : start + len(members)] = members
        for place, assignment in enumerate(members):
            inverse[assignment] = start + place
    # With tiles of one row it is left out.
    assert plan.flat_P.tolist()[: len(wanted)] == (wanted if size > 1 else [])
    assert token[: len(wanted)] == [i if i < 0 else i // slots for i in wanted]
    assert plan.inverse_TK.flatten().tolist() == inverse
    # What lies past the last tile is nobody's.
    assert set(token[len(wanted) :]) <= {UNWRITTEN}
    assert set(plan.flat_P.tolist()[len(wanted) :]) <= {UNWRITTEN}
    assert set(expert_of[len(laid) :]) <= {UNWRITTEN}


def counts_are_scanned(blocks, experts):
    """Sums over the blocks before, for more blocks than a program reads at once."""
    counts = torch.randint(0, 100, (blocks, experts), dtype=torch.int32)
    got, totals = counts.clone(), torch.empty(experts, dtype=torch.int32)
    plans.scan_kernel[(experts,)](got, totals, blocks, EXPERTS=experts, CHUNK=1024)
    assert torch.equal(got, (counts.cumsum(0) - counts).int())
    assert torch.equal(totals, counts.sum(0).int())


def values_go_to_rows_and_sums_come_back(tokens, slots, parts):
    """A value for each row that an assignment has, and the sums of a row's parts; 0 without one."""
    ids = torch.randint(-1, 4, (tokens, slots))
    plan = plan_rows(ids, 3, tile_rows=1)
    inverse, real = plan.inverse_TK.flatten().long(), plan.inverse_TK.flatten() >= 0
    values, out = torch.randn(tokens * slots), torch.empty(tokens * slots)
    grid, sizes = (-(-tokens * slots // 64),), {"BLOCK": 64}
    tile_kernels.spread_kernel[grid](values, plan.inverse_TK, out, tokens * slots, **sizes)
    assert torch.equal(out[inverse[real]], values[real])
    assert out[int(real.sum()) :].isnan().all()
    of_rows, sums = torch.randn(tokens * slots, parts), torch.empty(tokens, slots)
    tile_kernels.gather_sums_kernel[grid](
        of_rows, plan.inverse_TK, sums, tokens * slots, PARTS=parts, **sizes
    )
    assert torch.allclose(sums.flatten()[real], of_rows.sum(1)[inverse[real]], atol=1e-5)
    assert not sums.flatten()[~real].any()


def many_experts(experts, slots):
    """A plan for hundreds of experts, where a block counts few assignments."""
    ids = torch.rand(40, experts).topk(slots).indices
    plan = plan_rows(ids, experts)
    rows = plan.inverse_TK.flatten()
    assert torch.equal(plan.flat_P[rows].long(), torch.arange(40 * slots))
    tile = plan.tile_expert_N[rows // TILE_ROWS]
    assert torch.equal(tile.long(), ids.flatten())
    assert (plan.token_P[: int(plan.tiles) * TILE_ROWS] >= 0).sum() == 40 * slots


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    rows_are_placed()
    for blocks in (1023, 1024, 2100):
        counts_are_scanned(blocks, 2)
    many_experts(512, 3)
    values_go_to_rows_and_sums_come_back(70, 3, 4)
    sys.stdout.write("all hold\n")
