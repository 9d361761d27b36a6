"""Triton kernels of the one-sided exchange: rows are stored straight into the memory of peers.

`count_kernel` and `place_kernel` plan what a rank sends. `put_kernel` stores rows of tokens at the
owners of their experts; `return_kernel` stores rows of results back at the tokens' ranks. The last
program of either releases a flag at every peer, for which `meet_kernel` waits. `open_kernel` reads
what came with rows of tokens, and `sum_kernel` adds the rows of results of each token, owner after
owner. A program moves a tile of rows at once, to have enough under way; nothing is decided by the
order in which programs run.

The epoch lives in device memory, so that a captured graph may be replayed: all kernels of an
exchange read it, and the last program of the last one advances it. Flags are released and acquired
at system scope; what many programs stored is gathered by a counter before the release.

Letters: R ranks, T tokens here, T_max the most of any rank, K slots, H width. An exchange uses one
of two areas of R segments, one per source, of T_max rows; offsets into a rank's symmetric memory
are in bytes from its base.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def count_kernel(
    ids_ptr, counts_ptr, tokens, slots, experts, experts_local, ranks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts [blocks, R, 2]: the rows and the slots that a block's tokens have for each owner."""
    block = tl.program_id(0)
    owner_TK = owners(ids_ptr, block, tokens, slots, experts, experts_local, SLOTS, BLOCK)
    for owner in range(ranks):
        chosen = tl.sum((owner_TK == owner).to(tl.int32), axis=1)
        at = counts_ptr + (block * ranks + owner) * 2
        tl.store(at, tl.sum((chosen > 0).to(tl.int32), axis=0))
        tl.store(at + 1, tl.sum(chosen, axis=0))


@triton.jit
def place_kernel(
    ids_ptr, counts_ptr, slot_ptr, rows_ptr, assignments_ptr,
    tokens, slots, experts, experts_local, ranks, blocks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """slot [T, R]: a row's place among this rank's rows for that owner, by token; -1 for none.

    rows and assignments [R]: int64, how many rows and slots each owner gets. BLOCKS: a power of two
    that holds the blocks.
    """
    block = tl.program_id(0)
    owner_TK = owners(ids_ptr, block, tokens, slots, experts, experts_local, SLOTS, BLOCK)
    token = block * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCKS)
    for owner in range(ranks):
        at = counts_ptr + (other * ranks + owner) * 2
        counts = tl.load(at, mask=other < blocks, other=0)
        sent = (tl.sum((owner_TK == owner).to(tl.int32), axis=1) > 0).to(tl.int32)
        before = tl.sum(tl.where(other < block, counts, 0), axis=0)
        place = tl.where(sent > 0, before + tl.cumsum(sent, 0) - 1, -1)
        tl.store(slot_ptr + token * ranks + owner, place, mask=token < tokens)
        if block == 0:
            chosen = tl.load(at + 1, mask=other < blocks, other=0)
            tl.store(rows_ptr + owner, tl.sum(counts, axis=0).to(tl.int64))
            tl.store(assignments_ptr + owner, tl.sum(chosen, axis=0).to(tl.int64))


@triton.jit
def owners(
    ids_ptr, block, tokens, slots, experts, experts_local, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The owners [BLOCK, SLOTS] of what a block's tokens chose; -1 for nothing."""
    token, k = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    known = (token < tokens)[:, None] & (k < slots)[None, :]
    ids = tl.load(ids_ptr + token[:, None] * slots + k[None, :], mask=known, other=-1)
    return tl.where((ids >= 0) & (ids < experts), ids // experts_local, -1)


@triton.jit
def put_kernel(
    x_ptr, ids_ptr, weights_ptr, slot_ptr, rows_ptr,
    bases_ptr, epoch_ptr, done_ptr, rows_sent_ptr, bytes_sent_ptr,
    tokens, width, slots, experts_local, me, ranks, tokens_max, row_bytes,
    rows_at, ids_at, weights_at, counts_at, flags_at,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores x [T, H] in segment `me` of every owner that slot [T, R] gives a row.

    WITH_SLOTS: ids and weights of each row's slots go with it; the ids of others' experts as -1.
    rows [R]: int64, how many rows each owner gets. The *_at are offsets of the area's parts and of
    the flags. Adds to rows_sent and bytes_sent [R] what goes to others, a row having `row_bytes`.
    """
    programs = tl.num_programs(0)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TILE), programs):
        token = tile * TILE + tl.arange(0, TILE)
        exists = token < tokens
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (column < width)[None, :]
            at = token.to(tl.int64)[:, None] * width + column[None, :]
            x = tl.load(x_ptr + at, mask=exists[:, None] & inside, other=0.0)
            for owner in range(ranks):
                slot = tl.load(slot_ptr + token * ranks + owner, mask=exists, other=-1)
                area = part_of(bases_ptr, owner, rows_at, x_ptr.dtype)
                row = (me * tokens_max + slot).to(tl.int64)
                there = area + row[:, None] * width + column[None, :]
                tl.store(there, x, mask=(slot >= 0)[:, None] & inside)
        if WITH_SLOTS:
            k = tl.arange(0, SLOTS)
            known = exists[:, None] & (k < slots)[None, :]
            at = token.to(tl.int64)[:, None] * slots + k[None, :]
            ids = tl.load(ids_ptr + at, mask=known, other=-1)
            weights = tl.load(weights_ptr + at, mask=known, other=0.0)
            for owner in range(ranks):
                slot = tl.load(slot_ptr + token * ranks + owner, mask=exists, other=-1)
                local = ids - owner * experts_local
                theirs = (local >= 0) & (local < experts_local)
                at = (me * tokens_max + slot).to(tl.int64)[:, None] * slots + k[None, :]
                sent = known & (slot >= 0)[:, None]
                ids_area = part_of(bases_ptr, owner, ids_at, tl.pointer_type(tl.int32))
                weights_area = part_of(bases_ptr, owner, weights_at, weights_ptr.dtype)
                tl.store(ids_area + at, tl.where(theirs, local, -1).to(tl.int32), mask=sent)
                tl.store(weights_area + at, tl.where(theirs, weights, 0.0), mask=sent)
    if is_last(done_ptr):
        for peer in range(ranks):
            rows = tl.load(rows_ptr + peer)
            counts = part_of(bases_ptr, peer, counts_at, tl.pointer_type(tl.int64))
            tl.store(counts + me, rows)
            add_sent(rows_sent_ptr, bytes_sent_ptr, peer, rows, me, row_bytes)
        release(bases_ptr, epoch_ptr, me, ranks, flags_at)


@triton.jit
def return_kernel(
    rows_ptr, values_ptr, counts_ptr, bases_ptr, epoch_ptr, done_ptr, rows_sent_ptr, bytes_sent_ptr,
    width, slots, me, ranks, tokens_max, row_bytes, rows_at, values_at, flags_at,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores rows [R * T_max, H] of segment s in segment `me` of source s, for all but this rank.

    counts [R]: int64, how many rows of each segment are used. WITH_SLOTS: values [R * T_max, K] go
    with their rows. Adds to rows_sent and bytes_sent [R] as `put_kernel` does.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    for other in range(1, ranks):
        source = (me + other) % ranks
        count = tl.load(counts_ptr + source)
        area = part_of(bases_ptr, source, rows_at, rows_ptr.dtype)
        # Sources start at different programs, so that short segments spread over all of them.
        for tile in range((program + source) % programs, tl.cdiv(count, TILE), programs):
            slot = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
            used, row, there = slot < count, source * tokens_max + slot, me * tokens_max + slot
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)[None, :]
                mask = used & (column < width)
                value = tl.load(rows_ptr + row * width + column, mask=mask)
                tl.store(area + there * width + column, value, mask=mask)
            if WITH_SLOTS:
                k = tl.arange(0, SLOTS)[None, :]
                mask = used & (k < slots)
                values = part_of(bases_ptr, source, values_at, values_ptr.dtype)
                value = tl.load(values_ptr + row * slots + k, mask=mask)
                tl.store(values + there * slots + k, value, mask=mask)
    if is_last(done_ptr):
        release(bases_ptr, epoch_ptr, me, ranks, flags_at)
        # Peers need not wait for these sums.
        for peer in range(ranks):
            add_sent(rows_sent_ptr, bytes_sent_ptr, peer, tl.load(counts_ptr + peer), me, row_bytes)


@triton.jit
def meet_kernel(
    bases_ptr, epoch_ptr, done_ptr, failed_ptr, report_ptr, wait_ns_ptr,
    me, flags_at, deadline_ns, area, AREAS: tl.constexpr,
):  # fmt: skip
    """Program s waits until rank s has released the epoch; the last program ends the epoch."""
    epoch = tl.load(epoch_ptr) + 1
    wait_for(
        tl.program_id(0), epoch, bases_ptr, failed_ptr, report_ptr, wait_ns_ptr,
        me, flags_at, deadline_ns, area, True, AREAS,
    )  # fmt: skip
    if is_last(done_ptr):
        tl.store(epoch_ptr, epoch)


@triton.jit
def wait_for(
    peer, epoch, bases_ptr, failed_ptr, report_ptr, wait_ns_ptr,
    me, flags_at, deadline_ns, area, told, AREAS: tl.constexpr,
):  # fmt: skip
    """Waits until a peer has released the epoch here, at most `deadline_ns` nanoseconds.

    A wait that fails is noted once: failed [1] on the device makes later waits return at once;
    report [3] in the host's memory gets 1 + peer, the epoch, and 1 for a late peer or 2 for an
    epoch whose area is not the one that the host counted on. told: whether wait_ns [R] gets the
    nanoseconds waited.
    """
    flag_ptr = part_of(bases_ptr, me, flags_at, tl.pointer_type(tl.int64)) + peer
    wrong = epoch % AREAS != area
    failed = tl.load(failed_ptr) != 0
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if ((flag < epoch) & (failed == 0)) | wrong:
        start = cuda.globaltimer()
        now = start
        while (flag < epoch) & (now - start < deadline_ns) & (wrong == 0):
            flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            now = cuda.globaltimer()
        if told:
            tl.store(wait_ns_ptr + peer, tl.load(wait_ns_ptr + peer) + now - start)
        if wrong | (flag < epoch):
            first = tl.atomic_cas(failed_ptr, 0, 1) == 0
            tl.store(report_ptr + 1, epoch, mask=first)
            tl.store(report_ptr + 2, tl.where(wrong, 2, 1), mask=first)
            tl.debug_barrier()
            tl.atomic_xchg(report_ptr, peer + 1, mask=first, sem="release", scope="sys")


@triton.jit
def open_kernel(
    ids_area_ptr, weights_area_ptr, counts_area_ptr, ids_ptr, weights_ptr, counts_ptr,
    slots, ranks, tokens_max, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copies ids and weights [R * T_max, K] out of the area; -1 and 0 in rows that are not used.

    Program (tile, s) has rows of segment s. counts [R]: gets how many rows of each are used.
    """
    source = tl.program_id(1)
    count = tl.load(counts_area_ptr + source)
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, SLOTS)
    inside = (slot < tokens_max)[:, None] & (k < slots)[None, :]
    used = inside & (slot < count)[:, None]
    at = (source * tokens_max + slot).to(tl.int64)[:, None] * slots + k[None, :]
    tl.store(ids_ptr + at, tl.load(ids_area_ptr + at, mask=used, other=-1), mask=inside)
    tl.store(weights_ptr + at, tl.load(weights_area_ptr + at, mask=used, other=0.0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + source, count)


@triton.jit
def sum_kernel(
    own_ptr, own_values_ptr, area_ptr, values_area_ptr, slot_ptr, out_ptr, values_ptr,
    width, slots, me, ranks, tokens_max,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the sum of a token's rows over owners, in rank order, in fp32; 0 without rows.

    Program (t, b) takes BLOCK columns of token t. Rows of this rank are read where they
    are, in own [R * T_max, H]; those of others in the area. WITH_SLOTS: values [T, K] is the same
    sum of the values that came with the rows.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, SLOTS)
    total = tl.zeros((BLOCK,), tl.float32)
    values = tl.zeros((SLOTS,), tl.float32)
    for owner in range(ranks):
        slot = tl.load(slot_ptr + token * ranks + owner)
        row = (owner * tokens_max + slot).to(tl.int64)
        # A token without a row at this owner reads nothing.
        columns, known = tl.where(slot >= 0, width, 0), tl.where(slot >= 0, slots, 0)
        at, values_at = row * width + column, row * slots + k
        if owner == me:
            total += tl.load(own_ptr + at, mask=column < columns, other=0.0)
            if WITH_SLOTS:
                values += tl.load(own_values_ptr + values_at, mask=k < known, other=0.0)
        else:
            total += tl.load(area_ptr + at, mask=column < columns, other=0.0)
            if WITH_SLOTS:
                values += tl.load(values_area_ptr + values_at, mask=k < known, other=0.0)
    tl.store(out_ptr + token * width + column, total, mask=column < width)
    if WITH_SLOTS and tl.program_id(1) == 0:
        tl.store(values_ptr + token * slots + k, values, mask=k < slots)


@triton.jit
def add_sent(rows_sent_ptr, bytes_sent_ptr, peer, rows, me, row_bytes):
    """Adds rows for a peer, and their bytes, to what was sent; nothing for this rank."""
    crossing = tl.where(peer == me, 0, rows)
    tl.store(rows_sent_ptr + peer, tl.load(rows_sent_ptr + peer) + crossing)
    tl.store(bytes_sent_ptr + peer, tl.load(bytes_sent_ptr + peer) + crossing * row_bytes)


@triton.jit
def is_last(done_ptr):
    """Whether all other programs of the grid have come here; what they stored is then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(done_ptr, 0)
    return last


@triton.jit
def release(bases_ptr, epoch_ptr, me, ranks, flags_at):
    """Releases the flag of the epoch at every rank."""
    tl.debug_barrier()
    epoch = tl.load(epoch_ptr) + 1
    for peer in range(ranks):
        flags = part_of(bases_ptr, peer, flags_at, tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + me, epoch, sem="release", scope="sys")


@triton.jit
def part_of(bases_ptr, rank, offset, kind: tl.constexpr):
    """A part of a rank's symmetric memory, as a pointer; parts start at 16 bytes."""
    address = tl.load(bases_ptr + rank) + offset
    return tl.multiple_of(address.to(kind), 16)
