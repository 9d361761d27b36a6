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
@given(ids_and_experts())
def rows_are_placed(case):
    """Every assignment has one row, in stable order, in whole tiles of its expert."""
    ids, experts = case
    slots, flat = ids.shape[1], ids.flatten().tolist()
    plan = plan_rows(torch.from_numpy(ids), experts)
    token, expert_of = plan.token_P.tolist(), plan.tile_expert_N.tolist()
    own = [[i for i, e in enumerate(flat) if e == expert] for expert in range(experts)]
    tiles = [-(-len(members) // TILE_ROWS) for members in own]
    starts = [sum(tiles[:e]) * TILE_ROWS for e in range(experts + 1)]

    assert plan.offsets_E1.tolist() == starts
    assert plan.ends_E.tolist() == [
        start + len(members) for start, members in zip(starts, own, strict=False)
    ]
    assert plan.tiles.tolist() == [sum(tiles)]
    assert expert_of[: sum(tiles)] == [e for e in range(experts) for _ in range(tiles[e])]
    wanted = [-1] * (sum(tiles) * TILE_ROWS)
    inverse = [-1] * len(flat)
    for start, members in zip(starts, own, strict=False):
        wanted[start : start + len(members)] = members
        for place, assignment in enumerate(members):
            inverse[assignment] = start + place
    assert plan.flat_P.tolist()[: len(wanted)] == wanted
    assert token[: len(wanted)] == [i if i < 0 else i // slots for i in wanted]
    assert plan.inverse_TK.flatten().tolist() == inverse
    # What lies past the last tile is nobody's.
    assert set(token[len(wanted) :]) <= {UNWRITTEN}
    assert set(plan.flat_P.tolist()[len(wanted) :]) <= {UNWRITTEN}
    assert set(expert_of[sum(tiles) :]) <= {UNWRITTEN}


def counts_are_scanned(blocks, experts):
    """Sums over the blocks before, for more blocks than a program reads at once."""
    counts = torch.randint(0, 100, (blocks, experts), dtype=torch.int32)
    got, totals = counts.clone(), torch.empty(experts, dtype=torch.int32)
    plans.scan_kernel[(experts,)](got, totals, blocks, EXPERTS=experts, CHUNK=1024)
    assert torch.equal(got, (counts.cumsum(0) - counts).int())
    assert torch.equal(totals, counts.sum(0).int())


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
    sys.stdout.write("all hold\n")
