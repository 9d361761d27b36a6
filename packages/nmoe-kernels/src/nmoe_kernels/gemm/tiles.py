"""Triton kernels of the expert MLP over the padded rows of a RowPlan.

Four products, each by persistent programs that walk the tiles of the output: rows gathered from
tokens times a weight (`gathered_kernel`, and `up_kernel`, which applies SwiGLU before it stores),
sorted rows times a weight (`rows_kernel`), and rows times rows for the gradient of a weight
(`weight_grad_kernel`). Weights are read as [E, out, in] descriptors, so a tile that hangs over an
expert's edge is cut by the copy engine; flattening the loops over tiles and over the inner
dimension lets the next tile's copies start under this tile's epilogue. Between them: SwiGLU
backward by rows, the sum of a token's rows, and copies between tokens or assignments and rows. The
same source compiles to wgmma (sm_90) and tcgen05 (sm_100).

Letters: H width, I expert width, E experts; N columns of the output, C inner dimension.
"""

import triton
import triton.language as tl


@triton.jit
def place_tile(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a linear number: GROUP row tiles share the columns in L2."""
    width = GROUP * column_tiles
    first = tile // width * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    inside = tile % width
    return first + inside % size, inside // size


@triton.jit
def up_kernel(
    x_ptr, token_ptr, weight, h, a, tile_expert_ptr, tiles_ptr, width, expert_width,
    KEEP_H: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """h = x[token] W^T for gate and up at once, and a = silu(h_gate) * h_up.

    weight: descriptor of gate_up as [E, 2, I, H], block [1, 2, BN, BK]. h: [P, 2, I], block
    [TILE, 1, BN], written with KEEP_H. a: [P, I], block [TILE, BN]. EVEN: BK divides H.
    """
    row_tiles, column_tiles = tl.load(tiles_ptr), tl.cdiv(expert_width, BN)
    inner = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = place_tile(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(tile_expert_ptr + row_tile)
        token = tl.load(token_ptr + row_tile * TILE + tl.arange(0, TILE))
        real = (token >= 0)[:, None]
        pointers = x_ptr + token.to(tl.int64)[:, None] * width + inner[None, :]
        acc = tl.zeros((TILE, 2 * BN), tl.float32)
        for c in range(0, width, BK):
            mask = real if EVEN else real & (c + inner < width)[None, :]
            x = tl.load(pointers + c, mask=mask, other=0.0)
            w = weight.load([expert, 0, column_tile * BN, c]).reshape(2 * BN, BK)
            acc = tl.dot(x, w.T, acc)
        gate, up = acc.reshape(TILE, 2, BN).permute(0, 2, 1).split()
        gate, up = gate.to(a.dtype), up.to(a.dtype)
        if KEEP_H:
            h.store([row_tile * TILE, 0, column_tile * BN], gate.reshape(TILE, 1, BN))
            h.store([row_tile * TILE, 1, column_tile * BN], up.reshape(TILE, 1, BN))
        gate32 = gate.to(tl.float32)
        product = gate32 * tl.sigmoid(gate32) * up.to(tl.float32)
        a.store([row_tile * TILE, column_tile * BN], product.to(a.dtype))


@triton.jit
def rows_kernel(
    rows, weight, out, tile_expert_ptr, tiles_ptr, inner_width, columns,
    TRANSPOSED: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """out[P, N] = rows[P, C] times the expert's weight.

    weight: descriptor of [E, N, C], block [1, BN, BK], or with TRANSPOSED of [E, C, N], block
    [1, BK, BN]. out: block [TILE, BN], or half as wide with HALVES (less shared memory).
    """
    row_tiles, column_tiles = tl.load(tiles_ptr), tl.cdiv(columns, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = place_tile(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(tile_expert_ptr + row_tile)
        row, column = row_tile * TILE, column_tile * BN
        acc = tl.zeros((TILE, BN), tl.float32)
        for c in range(0, inner_width, BK):
            r = rows.load([row, c])
            if TRANSPOSED:
                acc = tl.dot(r, weight.load([expert, c, column]).reshape(BK, BN), acc)
            else:
                acc = tl.dot(r, weight.load([expert, column, c]).reshape(BN, BK).T, acc)
        if HALVES:
            left, right = acc.reshape(TILE, 2, BN // 2).permute(0, 2, 1).split()
            out.store([row, column], left.to(out.dtype))
            out.store([row, column + BN // 2], right.to(out.dtype))
        else:
            out.store([row, column], acc.to(out.dtype))


@triton.jit
def weight_grad_kernel(
    left, right, out, offsets_ptr, ends_ptr, left_width, right_width, experts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[e] = left^T right over the rows of expert e; an expert without rows gets zeros.

    left: descriptor of [P, left_width], block [BK, BM]. right: [P, right_width], block [BK, BN].
    out: [E, left_width, right_width], block [1, BM, BN]. BK divides the padding of a run.
    """
    left_tiles, right_tiles = tl.cdiv(left_width, BM), tl.cdiv(right_width, BN)
    per_expert = left_tiles * right_tiles
    for tile in tl.range(tl.program_id(0), experts * per_expert, PROGRAMS, flatten=True):
        expert = tile // per_expert
        i, j = place_tile(tile % per_expert, left_tiles, right_tiles, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(tl.load(offsets_ptr + expert), tl.load(ends_ptr + expert), BK):
            acc = tl.dot(left.load([row, i * BM]).T, right.load([row, j * BN]), acc)
        out.store([expert, i * BM, j * BN], acc.to(out.dtype).reshape(1, BM, BN))


@triton.jit
def swiglu_backward_kernel(
    h_ptr, grad_a_ptr, weight_ptr, flat_ptr, grad_h_ptr, grad_weight_ptr, tiles_ptr, expert_width,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the gradient of h; that of the router's weight, <a, grad_a>; and weight * a.

    grad_a [P, I] is overwritten by weight * a, which the gradient of `down` is made of.
    """
    row = tl.program_id(0)
    if row < tl.load(tiles_ptr) * TILE:
        flat = tl.load(flat_ptr + row)
        weight = tl.load(weight_ptr + flat, mask=flat >= 0, other=0.0)
        column = tl.arange(0, BLOCK)
        inside = column < expert_width
        at = row.to(tl.int64) * expert_width + column
        at_h = row.to(tl.int64) * (2 * expert_width) + column
        gate = tl.load(h_ptr + at_h, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at_h + expert_width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        a = silu * up
        tl.store(grad_weight_ptr + flat, tl.sum(a * grad, 0), mask=flat >= 0)
        grad *= weight
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(grad_h_ptr + at_h, grad_gate.to(grad_h_ptr.dtype.element_ty), mask=inside)
        grad_up = (grad * silu).to(grad_h_ptr.dtype.element_ty)
        tl.store(grad_h_ptr + at_h + expert_width, grad_up, mask=inside)
        tl.store(grad_a_ptr + at, (a * weight).to(grad_a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_slots_kernel(
    rows_ptr, inverse_ptr, weight_ptr, out_ptr, width,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over slots, in order and in fp32, of a token's rows, weighted or not."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(SLOTS):
        row = tl.load(inverse_ptr + token * SLOTS + k).to(tl.int64)
        # A dropped assignment has no row, and reads nothing.
        readable = column < tl.where(row >= 0, width, 0)
        value = tl.load(rows_ptr + row * width + column, mask=readable, other=0.0)
        if WEIGHTED:
            acc += value.to(tl.float32) * tl.load(weight_ptr + token * SLOTS + k)
        else:
            acc += value.to(tl.float32)
    tl.store(out_ptr + token * width + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scatter_kernel(
    x_ptr, inverse_ptr, offsets_ptr, ends_ptr, out_ptr, tokens, width,
    SLOTS: tl.constexpr, TILE: tl.constexpr, CLEARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = x[t] for every row of token t, and zeros in padding rows.

    A token is read once. Programs past the tokens clear CLEARED rows of an expert's last tile each.
    """
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if program < tokens:
        token = program.to(tl.int64)
        value = tl.load(x_ptr + token * width + column, mask=column < width)
        for k in tl.static_range(SLOTS):
            row = tl.load(inverse_ptr + token * SLOTS + k).to(tl.int64)
            # A dropped assignment has no row, and writes nothing.
            writable = column < tl.where(row >= 0, width, 0)
            tl.store(out_ptr + row * width + column, value, mask=writable)
    else:
        pieces: tl.constexpr = TILE // CLEARED
        expert, piece = (program - tokens) // pieces, (program - tokens) % pieces
        last, end = tl.load(offsets_ptr + expert + 1) - 1, tl.load(ends_ptr + expert)
        zeros = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
        for i in tl.static_range(CLEARED):
            cleared = last - piece * CLEARED - i
            writable = column < tl.where(cleared >= end, width, 0)
            tl.store(out_ptr + cleared.to(tl.int64) * width + column, zeros, mask=writable)


@triton.jit
def spread_kernel(values_ptr, inverse_ptr, out_ptr, assignments, BLOCK: tl.constexpr):
    """out[row] = the value of the assignment that has the row."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < assignments
    row = tl.load(inverse_ptr + flat, mask=inside, other=-1)
    value = tl.load(values_ptr + flat, mask=inside)
    tl.store(out_ptr + row, value, mask=row >= 0)


@triton.jit
def gather_sums_kernel(
    parts_ptr, inverse_ptr, out_ptr, assignments, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[assignment] = the sum of its row of parts [P, PARTS], in order; 0 if it has no row."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < assignments
    row = tl.load(inverse_ptr + flat, mask=inside, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + row * PARTS + part, mask=row >= 0, other=0.0)
    tl.store(out_ptr + flat, total, mask=inside)
