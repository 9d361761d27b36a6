"""Triton kernels of the router: all but the product of x and the weight, and that of its gradient.

`split_kernel` writes the fp32 weight as bf16 parts. `choose_kernel` goes from the products to the
routing in registers: whether a token's logits are finite, scores, the best groups, K rounds of
argmax, weights, and the load of the experts. `logits_grad_kernel` goes from the gradients of
weights and logits to that of the logits, as bf16 parts; `weight_grad_kernel` multiplies those by x.
Loads are counted with integer atomics, so every result repeats bitwise.

Matrices of logits lie as [E, T]: neighbouring threads have neighbouring tokens, and one thread much
of a token's row, so that an argmax is mostly a loop in registers.

Letters: T tokens, H width, E experts, K experts per token, G groups of experts. A group's experts
take a power of two of rows, so that a column is [G, rows of a group].
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-20)
# Below the order of every float: a row that cannot be chosen.
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def split_kernel(weight_ptr, parts_ptr, size, HIGHS: tl.constexpr, BLOCK: tl.constexpr):
    """parts = HIGHS copies of the weight in the type of parts, then what that rounds off."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < size, other=0.0)
    high = weight.to(parts_ptr.dtype.element_ty)
    low = (weight - high.to(tl.float32)).to(parts_ptr.dtype.element_ty)
    # A weight that is not finite makes no row valid; here it must not turn zeros into NaN.
    finite = tl.abs(weight) < float("inf")
    for copy in tl.static_range(HIGHS):
        kept = finite | (HIGHS == 1)
        tl.store(parts_ptr + copy * size + at, tl.where(kept, high, 0.0), mask=at < size)
    tl.store(parts_ptr + HIGHS * size + at, tl.where(finite, low, 0.0), mask=at < size)


@triton.jit
def choose_kernel(
    products_ptr, bias_ptr, ids_ptr, weights_ptr, logits_ptr, share_ptr, valid_ptr, counts_ptr,
    tokens, experts, plane, groups, group_size, scale,
    PARTS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALISE: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS_2: tl.constexpr,
    SIZE_2: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Routes BLOCK tokens whose logits are the sum over parts of products [PARTS, E, T].

    plane: E * T. counts [E + 1]: adds the tokens that chose each expert, and those not valid.
    share [T]: what the scores chosen are divided by; not written unless by a renormalised sigmoid.
    GROUPS_2, SIZE_2 and SLOTS_2 are G, E / G and K, made powers of two. LIMITED: a token chooses in
    its best TOP_GROUPS groups only.
    """
    ROWS: tl.constexpr = GROUPS_2 * SIZE_2
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    row = tl.arange(0, ROWS)
    group, place = row // SIZE_2, row % SIZE_2
    expert = group * group_size + place
    real = ((group < groups) & (place < group_size))[:, None]
    here = real & exists[None, :]

    at = expert.to(tl.int64)[:, None] * tokens + token[None, :]
    logits = tl.zeros((ROWS, BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(products_ptr + part * plane + at, mask=here, other=0.0)
    valid = tl.min((tl.abs(logits) < float("inf")).to(tl.int32), axis=0) > 0
    logits = tl.where(valid[None, :], logits, 0.0)
    tl.store(logits_ptr + at, logits, mask=here)
    tl.store(valid_ptr + token, valid, mask=exists)
    bad = tl.sum((exists & ~valid).to(tl.int64), axis=0)
    tl.atomic_add(counts_ptr + experts, bad, mask=bad > 0)

    top, total = softmax_parts(logits, real, SIGMOID)
    choice = score_of(logits, top[None, :], total[None, :], SIGMOID)
    if BIASED:
        bias = tl.load(bias_ptr + expert, mask=(group < groups) & (place < group_size), other=0.0)
        # An expert whose bias is NaN comes last.
        choice = tl.where(bias == bias, bias, float("-inf"))[:, None] + choice
    if LIMITED:
        grouped = tl.where(real, choice, float("-inf")).reshape(GROUPS_2, SIZE_2, BLOCK)
        is_open = best_groups(grouped, groups, group_size, SIGMOID, TOP_GROUPS)
        is_open = tl.broadcast_to(is_open[:, None, :], (GROUPS_2, SIZE_2, BLOCK))
        choice = tl.where(is_open.reshape(ROWS, BLOCK) > 0, choice, float("-inf"))
    order = tl.where(real, order_of(choice), TAKEN)

    slot = tl.arange(0, SLOTS_2)[:, None]
    ids = tl.zeros((SLOTS_2, BLOCK), tl.int32)
    for k in range(SLOTS):
        best = first_greatest(order)
        order = tl.where(row[:, None] == best[None, :], TAKEN, order)
        id_ = (best // SIZE_2) * group_size + best % SIZE_2
        ids = tl.where(slot == k, id_[None, :], ids)
    taken = (slot < SLOTS) & exists[None, :]
    # Cheaper than K more sums over the experts: the logits of the chosen are read again.
    at = ids.to(tl.int64) * tokens + token[None, :]
    chosen = tl.zeros((SLOTS_2, BLOCK), tl.float32)
    readable = taken & valid[None, :]
    for part in tl.static_range(PARTS):
        chosen += tl.load(products_ptr + part * plane + at, mask=readable, other=0.0)
    weights = score_of(chosen, top[None, :], total[None, :], SIGMOID)
    if RENORMALISE:
        share = tl.sum(tl.where(slot < SLOTS, weights, 0.0), axis=0) + TINY
        weights /= share[None, :]
        if SIGMOID:
            tl.store(share_ptr + token, share, mask=exists)
    at = token.to(tl.int64)[None, :] * SLOTS + slot
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=taken)
    tl.store(weights_ptr + at, weights * scale, mask=taken)
    count = tl.sum((here & (order == TAKEN)).to(tl.int32), axis=1)
    tl.atomic_add(counts_ptr + expert, count.to(tl.int64), mask=count > 0)


@triton.jit
def softmax_parts(logits, real, SIGMOID: tl.constexpr):
    """A token's greatest logit, and the sum of exp(logit - greatest); unused by sigmoid."""
    top, total = tl.zeros((logits.shape[1],), tl.float32), tl.zeros((logits.shape[1],), tl.float32)
    if not SIGMOID:
        top = tl.max(tl.where(real, logits, float("-inf")), axis=0)
        total = tl.sum(tl.where(real, tl.exp(logits - top[None, :]), 0.0), axis=0)
    return top, total


@triton.jit
def score_of(logits, top, total, SIGMOID: tl.constexpr):
    """Sigmoid, or softmax by its parts."""
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logits))
    else:
        score = tl.exp(logits - top) / total
    return score


@triton.jit
def first_greatest(order):
    """The lowest index of the greatest of each column."""
    index = tl.arange(0, order.shape[0])[:, None]
    greatest = tl.max(order, axis=0)
    return tl.min(tl.where(order == greatest[None, :], index, order.shape[0]), axis=0)


@triton.jit
def order_of(value):
    """An int32 that orders as the fp32 value, which is not NaN, does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def best_groups(grouped, groups, group_size, SIGMOID: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """1 for the TOP_GROUPS best groups of each token of [groups, size, tokens], 0 for others."""
    value = tl.max(grouped, axis=1)
    if SIGMOID:
        first = tl.argmax(grouped, axis=1, tie_break_left=True)
        place = tl.arange(0, grouped.shape[1])[None, :, None]
        rest = tl.where(place == first[:, None, :], float("-inf"), grouped)
        value += tl.where(group_size > 1, tl.max(rest, axis=1), 0.0)
    index = tl.arange(0, grouped.shape[0])[:, None]
    order = tl.where(index < groups, order_of(value), TAKEN)
    is_open = tl.zeros(order.shape, tl.int32)
    for _ in range(TOP_GROUPS):
        mine = index == first_greatest(order)[None, :]
        order = tl.where(mine, TAKEN, order)
        is_open = tl.where(mine, 1, is_open)
    return is_open


@triton.jit
def logits_grad_kernel(
    logits_ptr, ids_ptr, weights_ptr, share_ptr, valid_ptr, grad_weights_ptr, grad_logits_ptr,
    out_ptr, tokens, experts, plane, scale,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, FROM_WEIGHTS: tl.constexpr,
    FROM_LOGITS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient d of the logits of BLOCK tokens, as out [3, E, T] = (high, low, high).

    high + low is d. A weight is w = scale * p / S, of the chosen score p and, renormalised, the sum
    S of those chosen; else S is 1. With m = sum(grad w * w) / scale, renormalised, and else 0:
    d = w (grad w - m) for softmax, and that times 1 - p for sigmoid. Softmax that is not
    renormalised takes p * sum(grad w * w) from every expert, the only reason to read all logits
    (TINY, which S holds, is taken as 0 here); share is S, which only a renormalised sigmoid reads,
    to have p as w * S / scale. FROM_LOGITS adds the gradient that reaches the logits.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    row = tl.arange(0, ROWS)
    real = (row < experts)[:, None]
    here = real & exists[None, :]
    at = row.to(tl.int64)[:, None] * tokens + token[None, :]
    grad = tl.zeros((ROWS, BLOCK), tl.float32)
    if FROM_WEIGHTS:
        first = token.to(tl.int64) * SLOTS
        moved = tl.zeros((BLOCK,), tl.float32)
        for k in range(SLOTS):
            weight = tl.load(weights_ptr + first + k, mask=exists, other=0.0)
            moved += weight * tl.load(grad_weights_ptr + first + k, mask=exists, other=0.0)
        mean = tl.zeros((BLOCK,), tl.float32)
        of_weight = tl.zeros((BLOCK,), tl.float32) + 1 / scale
        if RENORMALISE:
            mean += moved / scale
            if SIGMOID:
                of_weight *= tl.load(share_ptr + token, mask=exists, other=0.0)
        for k in range(SLOTS):
            id_ = tl.load(ids_ptr + first + k, mask=exists, other=0)
            weight = tl.load(weights_ptr + first + k, mask=exists, other=0.0)
            upstream = tl.load(grad_weights_ptr + first + k, mask=exists, other=0.0)
            mine = weight * (upstream - mean)
            if SIGMOID:
                mine *= 1 - weight * of_weight
            grad = tl.where(row[:, None] == id_[None, :], mine[None, :], grad)
        if not SIGMOID and not RENORMALISE:
            logits = tl.load(logits_ptr + at, mask=here, other=0.0)
            top, total = softmax_parts(logits, real, SIGMOID)
            grad -= score_of(logits, top[None, :], total[None, :], SIGMOID) * moved[None, :]
    if FROM_LOGITS:
        grad += tl.load(grad_logits_ptr + at, mask=here, other=0.0)
    valid = tl.load(valid_ptr + token, mask=exists, other=0)
    grad = tl.where(valid[None, :] != 0, grad, 0.0)
    high = grad.to(out_ptr.dtype.element_ty)
    low = (grad - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, high, mask=here)
    tl.store(out_ptr + plane + at, low, mask=here)
    # Not as 2 * plane, which may pass 2^31.
    tl.store(out_ptr + plane + plane + at, high, mask=here)


@triton.jit
def weight_grad_kernel(
    x_ptr, grads_ptr, valid_ptr, out_ptr, tokens, width, experts, plane, piece,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[s] = (high + low) x over the `piece` tokens of program s, for grads as written above.

    out: fp32 [pieces, E, H]. plane: E * T. A token that is not valid is read as 0, since 0 times
    NaN is not 0.
    """
    column = tl.program_id(0) * BH + tl.arange(0, BH)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    start = tl.program_id(2) * piece
    acc = tl.zeros((BE, BH), tl.float32)
    for t in range(start, tl.minimum(start + piece, tokens), BT):
        token = t + tl.arange(0, BT)
        exists = token < tokens
        valid = tl.load(valid_ptr + token, mask=exists, other=0) != 0
        at = token.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_ptr + at, mask=valid[:, None] & (column < width)[None, :], other=0.0)
        at = expert.to(tl.int64)[:, None] * tokens + token[None, :]
        mask = (expert < experts)[:, None] & exists[None, :]
        acc = tl.dot(tl.load(grads_ptr + at, mask=mask, other=0.0), x, acc)
        acc = tl.dot(tl.load(grads_ptr + plane + at, mask=mask, other=0.0), x, acc)
    at = (tl.program_id(2) * experts + expert)[:, None] * width + column[None, :]
    tl.store(out_ptr + at, acc, mask=(expert < experts)[:, None] & (column < width)[None, :])
