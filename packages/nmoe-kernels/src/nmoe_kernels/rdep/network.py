"""The Triton kernel that sends staged rows by NVSHMEM, to GPUs of this host or of others.

A rank lays out what it sends in its staging area, as it will lie in the peers' areas. Every program
then puts its share of the rows for each peer, and with its last put, that of the count, adds one to
the peer's flag: an epoch is there when all programs have done so.

Letters: R ranks, T_max the most tokens of any rank.
"""

import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl

ADD = tl.constexpr(5)
"""NVSHMEM_SIGNAL_ADD."""


@triton.jit
def send_kernel(
    rows_ptr, bases_ptr, processes_ptr, me, ranks, tokens_max, row_bytes, slots_bytes,
    rows_at, ids_at, weights_at, counts_at, flags_at, staging,
    WITH_IDS: tl.constexpr, WITH_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Sends segment p of the staging area to segment `me` of peer p's area, for all peers.

    rows [R]: int64, how many rows each peer gets, of `row_bytes`. WITH_IDS, WITH_WEIGHTS: the ids
    and the weights of their slots go too, of `slots_bytes` a row each. processes [R]: int32, the
    number of each peer in NVSHMEM. The *_at are offsets of the area's parts and of the flags.
    """
    programs = tl.num_programs(0)
    base = tl.load(bases_ptr + me)
    for other in range(1, ranks):
        peer = (me + other) % ranks
        process = tl.load(processes_ptr + peer)
        count = tl.load(rows_ptr + peer)
        share = tl.cdiv(count, programs)
        first = tl.program_id(0) * share
        number = tl.minimum(share, count - first)
        there, here = me * tokens_max + first, peer * tokens_max + first
        if number > 0:
            put(base + rows_at, there, here, number, row_bytes, staging, process)
            if WITH_IDS:
                put(base + ids_at, there, here, number, slots_bytes, staging, process)
            if WITH_WEIGHTS:
                put(base + weights_at, there, here, number, slots_bytes, staging, process)
        nvshmem.fence()
        tl.debug_barrier()
        counts = base + counts_at
        staged_count = counts + staging + peer * 8
        tl.store(staged_count.to(tl.pointer_type(tl.int64)), count)
        tl.debug_barrier()
        nvshmem.putmem_signal_block_extern_wrapper(
            counts + me * 8,
            staged_count,
            tl.full((), 8, tl.int64),
            base + flags_at + me * 8,
            tl.full((), 1, tl.uint64),
            ADD,
            process,
        )


@triton.jit
def put(part, there, here, rows, row_bytes, staging, process):
    """Puts rows of the staging area's part at a peer's; all threads of a program together."""
    nvshmem.putmem_block_extern_wrapper(
        part + there * row_bytes,
        part + staging + here * row_bytes,
        rows * row_bytes,
        process,
    )
