"""Triton kernels of the one-sided exchange: rows are stored straight into the memory of peers.

`count_kernel` and `place_kernel` plan what a rank sends. `put_kernel` stores rows of tokens at the
owners of their experts; its last program releases a flag at every peer, for which `meet_kernel`
waits. `open_kernel` reads what came with the rows. `combine_kernel` stores rows of results back at
the tokens' ranks in chunks, with a flag for each, and meanwhile adds the rows that have come here,
owner after owner. A program moves a tile of rows at once, to have enough under way; nothing is
decided by the order in which programs run.

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

UNROLLED = tl.constexpr(8)
"""Owners whose rows are read at once; more would make the code long."""


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
    rows_at, ids_at, weights_at, counts_at, flags_at, staging,
    WITH_SLOTS: tl.constexpr, STAGED: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores x [T, H] in segment `me` of every owner that slot [T, R] gives a row.

    WITH_SLOTS: ids and weights of each row's slots go with it; the ids of others' experts as -1.
    rows [R]: int64, how many rows each owner gets. The *_at are offsets of the area's parts and of
    the flags. Adds to rows_sent and bytes_sent [R] what goes to others, a row having `row_bytes`.
    STAGED: what goes to others is stored in their segments of this rank's own staging area, at
    `staging` bytes from the area, and no flag is released.
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
                holder, segment, shift = place_of(owner, me, staging, STAGED)
                area = part_of(bases_ptr, holder, rows_at + shift, x_ptr.dtype)
                row = (segment * tokens_max + slot).to(tl.int64)
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
                holder, segment, shift = place_of(owner, me, staging, STAGED)
                at = (segment * tokens_max + slot).to(tl.int64)[:, None] * slots + k[None, :]
                sent = known & (slot >= 0)[:, None]
                ids_area = part_of(bases_ptr, holder, ids_at + shift, tl.pointer_type(tl.int32))
                weights_area = part_of(bases_ptr, holder, weights_at + shift, weights_ptr.dtype)
                tl.store(ids_area + at, tl.where(theirs, local, -1).to(tl.int32), mask=sent)
                tl.store(weights_area + at, tl.where(theirs, weights, 0.0), mask=sent)
    if comes_last(done_ptr, programs):
        for peer in range(ranks):
            rows = tl.load(rows_ptr + peer)
            holder, segment, shift = place_of(peer, me, staging, STAGED)
            counts = part_of(bases_ptr, holder, counts_at + shift, tl.pointer_type(tl.int64))
            tl.store(counts + segment, rows)
            add_sent(rows_sent_ptr, bytes_sent_ptr, peer, rows, me, row_bytes)
        if not STAGED:
            release(bases_ptr, tl.load(epoch_ptr) + 1, me, ranks, flags_at)


@triton.jit
def place_of(peer, me, staging, STAGED: tl.constexpr):
    """Where rows for a peer are stored: the holder, the segment there, and a shift of the area."""
    # Both branches of a condition on a constant give what the other cannot: types may differ.
    return (me, peer, tl.where(peer == me, 0, staging)) if STAGED else (peer, me, staging * 0)


@triton.jit
def combine_kernel(
    rows_ptr, values_ptr, counts_ptr, slot_ptr, expected_ptr, out_ptr, values_out_ptr,
    bases_ptr, epoch_ptr, done_ptr, chunks_done_ptr, ticket_ptr, clock_ptr,
    failed_ptr, report_ptr, wait_ns_ptr, rows_sent_ptr, bytes_sent_ptr,
    tokens, width, slots, me, ranks, tokens_max, row_bytes, putters,
    rows_at, values_at, flags_at, signals, deadline_ns, area,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr,
    AREAS: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns rows to their tokens' ranks and sums those that come here; ends the epoch.

    The first `putters` programs return rows, chunk after chunk (`return_rows`), while the others
    sum the tokens whose rows have come (`sum_rows`); in the end all sum. Who sums waits for the
    putters of other ranks, so all of them must find a multiprocessor at once: the caller starts no
    more programs than those. A flag is at an epoch when it is at `signals` times its number.
    ticket, chunks_done [CHUNKS], done: zero
    before and after.
    """
    program = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    if program < putters:
        return_rows(
            rows_ptr, values_ptr, counts_ptr, bases_ptr, epoch, chunks_done_ptr,
            width, slots, me, ranks, tokens_max, putters, rows_at, values_at, flags_at, 0,
            WITH_SLOTS, False, SLOTS, CHUNKS, TILE, BLOCK,
        )  # fmt: skip
    if program == 0:
        # Also for those that have no rows for us: who ends an epoch has seen all others in it.
        peer_R = tl.arange(0, RANKS)
        others_R = (peer_R < ranks) & (peer_R != me)
        flags = part_of(bases_ptr, me, flags_at, tl.pointer_type(tl.int64))
        waited_R = wait_for(
            others_R, flags + (CHUNKS - 1) * ranks + peer_R, epoch, signals, clock_ptr, failed_ptr,
            report_ptr, deadline_ns, area, RANKS, AREAS,
        )  # fmt: skip
        add_waited(wait_ns_ptr, waited_R, others_R, RANKS)
    sum_rows(
        rows_ptr, values_ptr, slot_ptr, expected_ptr, out_ptr, values_out_ptr,
        bases_ptr, epoch, ticket_ptr, clock_ptr, failed_ptr, report_ptr,
        tokens, width, slots, me, ranks, tokens_max, rows_at, values_at, flags_at, signals,
        deadline_ns, area, WITH_SLOTS, SLOTS, RANKS, CHUNKS, AREAS, TILE, SUMMED, BLOCK,
    )  # fmt: skip
    if comes_last(done_ptr, tl.num_programs(0)):
        tl.store(ticket_ptr, 0)
        tl.store(epoch_ptr, epoch)
        for peer in range(ranks):
            add_sent(rows_sent_ptr, bytes_sent_ptr, peer, tl.load(counts_ptr + peer), me, row_bytes)


@triton.jit
def return_rows(
    rows_ptr, values_ptr, counts_ptr, bases_ptr, epoch, chunks_done_ptr,
    width, slots, me, ranks, tokens_max, putters, rows_at, values_at, flags_at, staging,
    WITH_SLOTS: tl.constexpr, STAGED: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores rows [R * T_max, H] of segment s in segment `me` of source s, for all but this rank.

    Every segment goes in CHUNKS runs of rows; once run c of all segments is there, flag [c, me] of
    every peer is released. counts [R]: int64, how many rows of each segment are used. WITH_SLOTS:
    values [R * T_max, K] go with their rows. STAGED: as for `put_kernel`.
    """
    program = tl.program_id(0)
    for chunk in range(CHUNKS):
        for other in range(1, ranks):
            source = (me + other) % ranks
            count = tl.load(counts_ptr + source)
            size = chunk_rows(count, CHUNKS, TILE)
            first = chunk * size
            holder, segment, shift = place_of(source, me, staging, STAGED)
            area = part_of(bases_ptr, holder, rows_at + shift, rows_ptr.dtype)
            end = tl.minimum(first + size, count)
            # Tiles take turns through all chunks and sources, so that short runs spread as well.
            turn = (program + source + putters - first // TILE % putters) % putters
            for start in range(first + turn * TILE, end, putters * TILE):
                slot = (start + tl.arange(0, TILE)).to(tl.int64)[:, None]
                used, row, there = (
                    slot < end,
                    source * tokens_max + slot,
                    segment * tokens_max + slot,
                )
                for left in range(0, width, BLOCK):
                    column = left + tl.arange(0, BLOCK)[None, :]
                    mask = used & (column < width)
                    value = tl.load(rows_ptr + row * width + column, mask=mask)
                    tl.store(area + there * width + column, value, mask=mask)
                if WITH_SLOTS:
                    k = tl.arange(0, SLOTS)[None, :]
                    mask = used & (k < slots)
                    values = part_of(bases_ptr, holder, values_at + shift, values_ptr.dtype)
                    value = tl.load(values_ptr + row * slots + k, mask=mask)
                    tl.store(values + there * slots + k, value, mask=mask)
        if STAGED == 0 and comes_last(chunks_done_ptr + chunk, putters):
            release(bases_ptr, epoch, me + chunk * ranks, ranks, flags_at)


@triton.jit
def stage_kernel(
    rows_ptr, values_ptr, counts_ptr, bases_ptr,
    width, slots, me, ranks, tokens_max, rows_at, values_at, staging,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies rows that go back to others, and their values, to this rank's staging area."""
    return_rows(
        rows_ptr, values_ptr, counts_ptr, bases_ptr, 0, counts_ptr,
        width, slots, me, ranks, tokens_max, tl.num_programs(0), rows_at, values_at, 0, staging,
        WITH_SLOTS, True, SLOTS, 1, TILE, BLOCK,
    )  # fmt: skip


@triton.jit
def sum_rows(
    rows_ptr, values_ptr, slot_ptr, expected_ptr, out_ptr, values_out_ptr,
    bases_ptr, epoch, ticket_ptr, clock_ptr, failed_ptr, report_ptr,
    tokens, width, slots, me, ranks, tokens_max, rows_at, values_at, flags_at, signals,
    deadline_ns, area,
    WITH_SLOTS: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr,
    AREAS: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the sum of a token's rows over owners, in rank order, in fp32; 0 without rows.

    A program takes SUMMED tokens by ticket, and waits for the chunks in which their rows come.
    Rows of this rank are read where they are, in rows [R * T_max, H]; those of others in the area.
    expected [R]: int64, how many rows come from each owner. WITH_SLOTS: values_out [T, K] is the
    same sum of the values that came with the rows.
    """
    owners_R = tl.arange(0, RANKS)
    known = owners_R < ranks
    size_R = chunk_rows(tl.load(expected_ptr + owners_R, mask=known, other=0), CHUNKS, TILE)
    flags = part_of(bases_ptr, me, flags_at, tl.pointer_type(tl.int64))
    k = tl.arange(0, SLOTS)[None, :]
    # The last chunk of each owner that is known to be here.
    seen_R = tl.full((RANKS,), -1, size_R.dtype)
    tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while tile * SUMMED < tokens:
        token = (tile * SUMMED + tl.arange(0, SUMMED)).to(tl.int64)
        exists = token < tokens
        slot_ptrs = slot_ptr + token[:, None] * ranks + owners_R[None, :]
        mine = exists[:, None] & known[None, :]
        last_R = tl.max(tl.load(slot_ptrs, mask=mine, other=-1), axis=0)
        chunk_R = tl.maximum(last_R, 0) // size_R
        needed_R = (last_R >= 0) & (owners_R != me) & (chunk_R > seen_R)
        if tl.sum(needed_R.to(tl.int32), axis=0) > 0:
            wait_for(
                needed_R, flags + chunk_R * ranks + owners_R, epoch, signals, clock_ptr,
                failed_ptr, report_ptr, deadline_ns, area, RANKS, AREAS,
            )  # fmt: skip
            seen_R = tl.where(needed_R, chunk_R, seen_R)
        for left in range(0, width, BLOCK):
            column = left + tl.arange(0, BLOCK)[None, :]
            total = tl.zeros((SUMMED, BLOCK), tl.float32)
            if RANKS <= UNROLLED:
                for owner in tl.static_range(RANKS):
                    total += rows_of(
                        rows_ptr, bases_ptr, rows_at, slot_ptr, token, exists, column, width,
                        owner, me, ranks, tokens_max,
                    )  # fmt: skip
            else:
                for owner in range(ranks):
                    total += rows_of(
                        rows_ptr, bases_ptr, rows_at, slot_ptr, token, exists, column, width,
                        owner, me, ranks, tokens_max,
                    )  # fmt: skip
            inside = exists[:, None] & (column < width)
            tl.store(out_ptr + token[:, None] * width + column, total, mask=inside)
        if WITH_SLOTS:
            values = tl.zeros((SUMMED, SLOTS), tl.float32)
            for owner in range(ranks):
                values += rows_of(
                    values_ptr, bases_ptr, values_at, slot_ptr, token, exists, k, slots,
                    owner, me, ranks, tokens_max,
                )  # fmt: skip
            out_ptrs = values_out_ptr + token[:, None] * slots + k
            tl.store(out_ptrs, values, mask=exists[:, None] & (k < slots))
        tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def rows_of(
    own_ptr, bases_ptr, area_at, slot_ptr, token, exists, column, width, owner, me, ranks,
    tokens_max,
):  # fmt: skip
    """Columns of what came from an owner for tokens; 0 for nothing.

    This rank's own rows are read where they were made, those of others in the area.
    """
    # An unrolled loop has owners that do not exist.
    known = exists & (tl.zeros_like(token) + owner < ranks)
    slot = tl.load(slot_ptr + token * ranks + owner, mask=known, other=-1)[:, None]
    area = tl.load(bases_ptr + me) + area_at
    address = tl.where(me == owner, own_ptr.to(tl.int64), area)
    rows = tl.multiple_of(address.to(own_ptr.dtype), 16)
    at = (owner * tokens_max + slot).to(tl.int64) * width + column
    return tl.load(rows + at, mask=(slot >= 0) & (column < width), other=0.0)


@triton.jit
def chunk_rows(count, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Rows of a chunk of a segment of `count` rows: whole tiles, one at least."""
    return tl.maximum(tl.cdiv(tl.cdiv(count, CHUNKS), TILE), 1) * TILE


@triton.jit
def meet_kernel(
    bases_ptr, epoch_ptr, clock_ptr, failed_ptr, report_ptr, wait_ns_ptr,
    me, ranks, flags_at, signals, deadline_ns, area, RANKS: tl.constexpr, AREAS: tl.constexpr,
):  # fmt: skip
    """One program waits until all others have released the epoch, and ends it."""
    epoch = tl.load(epoch_ptr) + 1
    peer_R = tl.arange(0, RANKS)
    others_R = (peer_R < ranks) & (peer_R != me)
    flags = part_of(bases_ptr, me, flags_at, tl.pointer_type(tl.int64))
    waited_R = wait_for(
        others_R, flags + peer_R, epoch, signals, clock_ptr, failed_ptr, report_ptr, deadline_ns,
        area, RANKS, AREAS,
    )  # fmt: skip
    add_waited(wait_ns_ptr, waited_R, others_R, RANKS)
    tl.store(epoch_ptr, epoch)


@triton.jit
def wait_for(
    needed_R, flag_ptrs_R, epoch, signals, clock_ptr, failed_ptr, report_ptr, deadline_ns, area,
    RANKS: tl.constexpr, AREAS: tl.constexpr,
):  # fmt: skip
    """Waits until the flags of the needed peers are at the epoch, at most `deadline_ns` long.

    Returns the nanoseconds waited for each, int64 [RANKS]. A wait that fails is noted once: failed
    [1] on the device makes later waits return at once; report [3] in the host's memory gets 1 +
    peer, the epoch, and 1 for a late peer or 2 for an epoch whose area is not the one that the
    host counted on. clock [programs]: through which a program agrees on the time.
    """
    wrong, wanted = epoch % AREAS != area, epoch * signals
    waited_R = tl.zeros((RANKS,), tl.int64)
    late_R = needed_R & (acquire(flag_ptrs_R, needed_R) < wanted)
    late = tl.sum(late_R.to(tl.int32), axis=0)
    if ((late > 0) & (tl.load(failed_ptr) == 0)) | wrong:
        start = now_ns(clock_ptr)
        start = now_ns(clock_ptr)
        elapsed = start - start
        while (late > 0) & (elapsed < deadline_ns) & (wrong == 0):
            late_R = needed_R & (acquire(flag_ptrs_R, needed_R) < wanted)
            late = tl.sum(late_R.to(tl.int32), axis=0)
            elapsed = now_ns(clock_ptr) - start
            waited_R = tl.where(late_R, elapsed, waited_R)
        if wrong | (late > 0):
            first = tl.atomic_cas(failed_ptr, 0, 1) == 0
            peer = tl.min(tl.where(late_R, tl.arange(0, RANKS), RANKS - 1), axis=0)
            tl.store(report_ptr + 1, epoch, mask=first)
            tl.store(report_ptr + 2, tl.where(wrong, 2, 1), mask=first)
            tl.debug_barrier()
            report = (peer + 1).to(tl.int64)
            tl.atomic_xchg(report_ptr, report, mask=first, sem="release", scope="sys")
    tl.debug_barrier()
    return waited_R


@triton.jit
def add_waited(wait_ns_ptr, waited_R, known_R, RANKS: tl.constexpr):
    """Adds nanoseconds waited for each peer to those of earlier exchanges."""
    at = wait_ns_ptr + tl.arange(0, RANKS)
    tl.store(at, tl.load(at, mask=known_R) + waited_R, mask=known_R)


@triton.jit
def acquire(flag_ptrs, mask):
    """The values of flags; what was stored before their release is visible."""
    return tl.atomic_add(flag_ptrs, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def now_ns(clock_ptr):
    """The time of this program's last call, and notes that of this one.

    Threads read the clock apart; what one of them exchanged is the same for all.
    """
    at = clock_ptr + tl.program_id(0)
    return tl.atomic_xchg(at, cuda.globaltimer().to(tl.int64), sem="relaxed")


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
def add_sent(rows_sent_ptr, bytes_sent_ptr, peer, rows, me, row_bytes):
    """Adds rows for a peer, and their bytes, to what was sent; nothing for this rank."""
    crossing = tl.where(peer == me, 0, rows)
    tl.store(rows_sent_ptr + peer, tl.load(rows_sent_ptr + peer) + crossing)
    tl.store(bytes_sent_ptr + peer, tl.load(bytes_sent_ptr + peer) + crossing * row_bytes)


@triton.jit
def comes_last(done_ptr, programs):
    """Whether the other ones of `programs` have come here; what they stored is then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(done_ptr, 0)
    return last


@triton.jit
def release(bases_ptr, epoch, flag, ranks, flags_at):
    """Sets a flag to the epoch at every rank; what was stored there before is then visible."""
    tl.debug_barrier()
    for peer in range(ranks):
        flags = part_of(bases_ptr, peer, flags_at, tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + flag, epoch, sem="release", scope="sys")


@triton.jit
def part_of(bases_ptr, rank, offset, kind: tl.constexpr):
    """A part of a rank's symmetric memory, as a pointer; parts start at 16 bytes."""
    address = tl.load(bases_ptr + rank) + offset
    return tl.multiple_of(address.to(kind), 16)
