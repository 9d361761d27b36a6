"""Runs the kernels of the one-sided exchange for all ranks in Triton's interpreter on the CPU.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. Every rank's
symmetric memory is a CPU tensor, its base address what peers store to; ranks put one after another,
so that nobody has to wait: a flag that is not there would end in a note of a late peer. It takes
ranks, experts, slots and width; prints what differs as JSON.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from nmoe_kernels.rdep import kernels, memory
from nmoe_kernels.rdep.memory import lay_out
from nmoe_kernels.rdep.plan import PLANNED_TOKENS, plan_source
from nmoe_kernels.rdep.protocol import AREAS
from nmoe_kernels.rdep.transports.contract import Shape

# Enough of one rank for several blocks of the plan.
TOKENS = (9, 0, 300, 32, 1)
PROGRAMS, TILE = 3, 4
# As many chunks as longer exchanges have.
memory.CHUNK_TOKENS = 1
CHUNKS = memory.MOST_CHUNKS


@triton.jit
def return_kernel(
    rows_ptr, values_ptr, counts_ptr, bases_ptr, epoch_ptr, chunks_done_ptr,
    width, slots, me, ranks, tokens_max, putters, rows_at, values_at, flags_at,
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first half of `combine_kernel` alone."""
    kernels.return_rows(
        rows_ptr, values_ptr, counts_ptr, bases_ptr, tl.load(epoch_ptr) + 1, chunks_done_ptr,
        width, slots, me, ranks, tokens_max, putters, rows_at, values_at, flags_at, 0,
        True, False, SLOTS, CHUNKS, TILE, BLOCK,
    )  # fmt: skip


class Rank:
    """What one rank has: its tokens, their plan, and the memory that peers write."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape = shape
        self.x = torch.randn(tokens, shape.width)
        self.ids = torch.rand(tokens, shape.experts).topk(shape.slots, dim=-1).indices
        self.ids[::5, 0] = shape.experts
        self.weights = torch.rand(tokens, shape.slots)
        self.plan = plan_source(self.ids, shape.experts, shape.ranks)
        # What is not written must not be read: bytes of 0xFF are NaN, and ids that are none.
        self.memory = torch.full((lay_out(shape, staged=True).size,), 0xFF, dtype=torch.uint8)
        self.part(lay_out(shape, staged=True).flags, (CHUNKS * shape.ranks,), torch.int64).zero_()
        self.received = torch.empty(0)
        self.epoch = torch.zeros(1, dtype=torch.int64)
        self.done, self.ticket = torch.zeros(2, 1, dtype=torch.int32)
        self.chunks_done = torch.zeros(CHUNKS, dtype=torch.int32)
        self.clock = torch.zeros(PROGRAMS, dtype=torch.int64)
        # What a wait notes: nothing, where nobody is late.
        self.notes = [torch.zeros(size, dtype=torch.int64) for size in (1, 3, shape.ranks)]
        self.sent = torch.zeros(2, shape.ranks, dtype=torch.int64)
        self.returned = torch.zeros(2, shape.ranks, dtype=torch.int64)

    def part(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A part of the memory, as a tensor."""
        count = torch.Size(sizes).numel() * dtype.itemsize
        return self.memory[offset : offset + count].view(dtype).view(sizes)


def main(ranks: int, experts: int, slots: int, width: int) -> None:
    """Dispatches tokens and gradients, combines, and compares with loops over tokens."""
    torch.manual_seed(0)
    most = max(TOKENS[:ranks])
    shapes = [
        Shape(
            rank=rank,
            ranks=ranks,
            experts=experts,
            slots=slots,
            width=width,
            tokens_max=most,
            dtype=torch.float32,
            device=torch.device("cpu"),
            capacity=None,
            deadline_s=1.0,
        )
        for rank in range(ranks)
    ]
    world = [Rank(shape, tokens) for shape, tokens in zip(shapes, TOKENS, strict=False)]
    bases = torch.tensor([rank.memory.data_ptr() for rank in world])
    parts, wrong = lay_out(shapes[0], staged=True), []
    sizes = {"SLOTS": triton.next_power_of_2(slots), "TILE": TILE, "BLOCK": 16}
    for rank in world:
        wrong += planned(rank)

    for area, with_slots, staged in ((1, True, False), (0, False, False), (1, True, True)):
        for me, rank in enumerate(world):
            kernels.put_kernel[(PROGRAMS,)](
                rank.x, rank.ids, rank.weights, rank.plan.slot_TR, rank.plan.rows_R,
                bases, rank.epoch, rank.done, *rank.sent, len(rank.x), width, slots,
                experts // ranks, me, ranks, most, 4, parts.rows[area], parts.ids[area],
                parts.weights[area], parts.counts[area], parts.flags, parts.staging(area),
                WITH_SLOTS=with_slots, STAGED=staged, **sizes,
            )  # fmt: skip
        if staged:
            carry(world, area)
        for me, rank in enumerate(world):
            rows = rank.part(parts.rows[area], (ranks, most, width), torch.float32)
            before = int(rank.epoch)
            kernels.meet_kernel[(1,)](
                bases, rank.epoch, rank.clock, *rank.notes, me, ranks, parts.flags, 1, 0, area,
                RANKS=triton.next_power_of_2(ranks), AREAS=AREAS,
            )  # fmt: skip
            if rank.notes[1].any() or int(rank.epoch) != before + 1:
                wrong.append("meeting")
            rank.received = torch.empty(ranks, dtype=torch.int64)
            ids = torch.empty(ranks, most, slots, dtype=torch.int32)
            weights = torch.empty(ranks, most, slots)
            views = (
                rank.part(parts.ids[area], ids.shape, torch.int32),
                rank.part(parts.weights[area], ids.shape, torch.float32),
                rank.part(parts.counts[area], (ranks,), torch.int64),
            )
            kernels.open_kernel[(triton.cdiv(most, TILE), ranks)](
                *views,
                ids,
                weights,
                rank.received,
                slots,
                ranks,
                most,
                SLOTS=sizes["SLOTS"],
                TILE=TILE,
            )
            wrong += received(world, me, rows, ids, weights, with_slots)
    wrong += combined(world, bases, parts, sizes)
    for me, rank in enumerate(world):
        others = [0 if peer == me else 3 * int(rows) for peer, rows in enumerate(rank.plan.rows_R)]
        if rank.sent.tolist() != [others, [4 * rows for rows in others]]:
            wrong.append("sent")
        back = [0 if peer == me else int(rank.received[peer]) for peer in range(ranks)]
        if rank.returned.tolist() != [back, [4 * rows for rows in back]]:
            wrong.append("returned")
    sys.stdout.write(json.dumps(wrong))


def carry(world, area):
    """What the kernel of NVSHMEM does: staged segments go to where their peers expect them."""
    parts, shape = lay_out(world[0].shape, staged=True), world[0].shape
    sizes = (shape.ranks, shape.tokens_max)
    for me, rank in enumerate(world):
        for peer, other in enumerate(world):
            if peer == me:
                continue
            count = int(rank.plan.rows_R[peer])
            for part, columns, dtype in (
                (parts.rows, shape.width, torch.float32),
                (parts.ids, shape.slots, torch.int32),
                (parts.weights, shape.slots, torch.float32),
            ):
                staged = rank.part(part[-1], (*sizes, columns), dtype)[peer, :count]
                other.part(part[area], (*sizes, columns), dtype)[me, :count] = staged
            told = rank.part(parts.counts[-1], (shape.ranks,), torch.int64)[peer]
            other.part(parts.counts[area], (shape.ranks,), torch.int64)[me] = told
            flags = other.part(parts.flags, (CHUNKS * shape.ranks,), torch.int64)
            flags[me] = rank.epoch + 1


def planned(rank):
    """The plan by kernels against that of torch."""
    (tokens, slots), shape = rank.ids.shape, rank.shape
    blocks = max(1, triton.cdiv(tokens, PLANNED_TOKENS))
    counts = torch.empty(blocks, shape.ranks, 2, dtype=torch.int32)
    slot = torch.empty(tokens, shape.ranks, dtype=torch.int32)
    rows, assignments = torch.empty(2, shape.ranks, dtype=torch.int64)
    given = (tokens, slots, shape.experts, shape.experts_local, shape.ranks)
    tile = {"SLOTS": triton.next_power_of_2(slots), "BLOCK": PLANNED_TOKENS}
    kernels.count_kernel[(blocks,)](rank.ids, counts, *given, **tile)
    kernels.place_kernel[(blocks,)](
        rank.ids, counts, slot, rows, assignments, *given, blocks, BLOCKS=16, **tile
    )  # fmt: skip
    want = (rank.plan.slot_TR, rank.plan.rows_R, rank.plan.assignments_R)
    got = (slot, rows, assignments)
    return [] if all(map(torch.equal, got, want)) else ["plan"]


def received(world, me, rows, ids, weights, with_slots):
    """What rank `me` has, against the tokens of each source that chose its experts."""
    wrong, own = [], world[me].shape.experts_local
    for source, rank in enumerate(world):
        mine = (rank.ids // own == me) & (rank.ids < rank.shape.experts)
        tokens = mine.any(1).nonzero().flatten()
        used = len(tokens)
        if int(world[me].received[source]) != used:
            wrong.append("count")
        if not torch.equal(rows[source, :used], rank.x[tokens]):
            wrong.append("rows")
        if with_slots:
            local = torch.where(mine, rank.ids - me * own, -1)[tokens]
            kept = torch.where(mine, rank.weights, 0.0)[tokens]
            rest = ids[source, used:]
            if not (torch.equal(ids[source, :used], local.int()) and bool((rest == -1).all())):
                wrong.append("ids")
            if not torch.equal(weights[source, :used], kept):
                wrong.append("weights")
    return wrong


def combined(world, bases, parts, sizes):
    """Results that differ by owner and slot, summed at their tokens."""
    shape, area, wrong = world[0].shape, 0, []
    ranks, most, slots, width = shape.ranks, shape.tokens_max, shape.slots, shape.width
    given = [torch.randn(ranks, most, width) for _ in world]
    values = [torch.randn(ranks, most, slots) for _ in world]
    cut = {"CHUNKS": CHUNKS, **sizes}
    for me, rank in enumerate(world):
        kernels.stage_kernel[(PROGRAMS,)](
            given[me], values[me], rank.received, bases, width, slots, me, ranks, most,
            parts.rows[area], parts.weights[area], parts.staging(area), WITH_SLOTS=True, **sizes,
        )  # fmt: skip
        rows = rank.part(parts.rows[-1], given[me].shape, torch.float32)
        slotted = rank.part(parts.weights[-1], values[me].shape, torch.float32)
        for source, count in enumerate(rank.received.tolist()):
            if source != me and not (
                torch.equal(rows[source, :count], given[me][source, :count])
                and torch.equal(slotted[source, :count], values[me][source, :count])
            ):
                wrong.append("staged results")
    for me, rank in enumerate(world[:-1]):
        return_kernel[(PROGRAMS,)](
            given[me], values[me], rank.received, bases, rank.epoch, rank.chunks_done,
            width, slots, me, ranks, most, PROGRAMS, parts.rows[area], parts.weights[area],
            parts.flags, **cut,
        )  # fmt: skip
    # The last rank finds all others' rows there, and does both at once.
    for me, rank in reversed(list(enumerate(world))):
        putters = 2 if me == ranks - 1 else 0
        tokens = len(rank.x)
        y, grads = torch.empty(tokens, width), torch.empty(tokens, slots)
        kernels.combine_kernel[(PROGRAMS,)](
            given[me], values[me], rank.received, rank.plan.slot_TR, rank.plan.rows_R, y, grads,
            bases, rank.epoch, rank.done, rank.chunks_done, rank.ticket, rank.clock, *rank.notes,
            *rank.returned, tokens, width, slots, me, ranks, most, 4, putters,
            parts.rows[area], parts.weights[area], parts.flags, 1, 0, area,
            WITH_SLOTS=True, RANKS=triton.next_power_of_2(ranks), AREAS=AREAS, SUMMED=2, **cut,
        )  # fmt: skip
        if rank.notes[1].any() or int(rank.epoch) != 4:
            wrong.append("meeting after results")
        if rank.done.any() or rank.ticket.any() or rank.chunks_done.any():
            wrong.append("counters")
        want, want_grads = torch.zeros(tokens, width), torch.zeros(tokens, slots)
        for token, places in enumerate(rank.plan.slot_TR.tolist()):
            for owner, place in enumerate(places):
                if place >= 0:
                    want[token] += given[owner][me, place]
                    want_grads[token] += values[owner][me, place]
        if not torch.equal(y, want):
            wrong.append("sum")
        if not torch.equal(grads, want_grads):
            wrong.append("sum of slots")
    return wrong


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
