"""The router for bf16 tokens and an fp32 weight on CUDA: cuBLAS products, and kernels between them.

The matrix unit multiplies bf16, so the weight goes in as two bf16 numbers that sum to it, which is
16 of its 24 bits; x is bf16 and exact, sums are fp32. Against fp64 the logits are then as far off
(3e-6) as with all 24 bits. The gradient of x is (high + low) W_high + high W_low, one product over
three times the experts. The backward is analytic. It keeps x, the weight, and of each token the ids
and weights; all logits only for a softmax whose weights are not renormalised.

Letters: T tokens, H width, E experts, K experts per token.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nmoe_kernels.router import kernels
from nmoe_kernels.router.config import RouterConfig, Routing
from nmoe_kernels.tensors import aligned

PARTS = 2
# Elements of the [experts, tokens] tile that the four warps of a program hold in registers.
CHOICE_ELEMENTS, GRAD_ELEMENTS = 4096, 2048
# The gradient of the weight is summed over so many runs of tokens, in tiles of so many columns.
GRAD_COLUMNS, GRAD_PIECES = 128, 16


class GradLaunch(NamedTuple):
    """experts: rows of an output tile. tokens: of a step."""

    experts: int
    tokens: int
    warps: int


NARROW_GRAD, WIDE_GRAD = GradLaunch(64, 64, 4), GradLaunch(128, 32, 8)


def route_triton(
    x_TH: Tensor, weight_EH: Tensor, config: RouterConfig, bias_E: Tensor | None = None
) -> Routing:
    """Routes T tokens without any limit on capacity; see `nmoe_kernels.router.route`.

    x: bf16. weight: fp32.
    """
    ids, weights, logits_ET, _, counts, valid = _route(
        x_TH.contiguous(),
        weight_EH.contiguous(),
        None if bias_E is None else bias_E.detach().float().contiguous(),
        config.top_k,
        config.score == "sigmoid",
        config.groups,
        config.top_groups,
        config.renormalise,
        config.scale,
    )
    return Routing(
        ids_TK=ids,
        weights_TK=weights,
        logits_TE=logits_ET.t(),
        score=config.score,
        load_E=counts[: config.experts],
        invalid=counts[config.experts],
        valid_T=valid,
        dropped=counts[config.experts + 1],
    )


@torch.library.custom_op("nmoe_kernels::route", mutates_args=())
def _route(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    slots: int,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ids [T, K], weights [T, K], logits [E, T], share [T] or [0], counts [E + 2], valid [T].

    share: the sum of the chosen scores, if a sigmoid's are renormalised by it. counts: the load of
    each expert, the tokens that are not valid, and a zero for those dropped.
    """
    outputs = _empty_outputs(
        x_TH, weight_EH, bias_E, slots, sigmoid, groups, top_groups, renormalise, scale
    )
    ids, weights, logits, share, counts, valid = outputs
    counts.zero_()
    experts, tokens = logits.shape
    if not tokens:
        return outputs
    parts = _split(weight_EH, 1, x_TH.dtype)
    products = _multiply(parts.flatten(0, 1), aligned(x_TH).t(), torch.float32)
    size_2, groups_2 = (triton.next_power_of_2(n) for n in (experts // groups, groups))
    block = max(1, CHOICE_ELEMENTS // (size_2 * groups_2))
    kernels.choose_kernel[(triton.cdiv(tokens, block),)](
        products,
        bias_E,
        ids,
        weights,
        logits,
        share,
        valid,
        counts,
        tokens,
        experts,
        experts * tokens,
        groups,
        experts // groups,
        scale,
        PARTS=PARTS,
        SIGMOID=sigmoid,
        BIASED=bias_E is not None,
        RENORMALISE=renormalise,
        SLOTS=slots,
        SLOTS_2=triton.next_power_of_2(slots),
        TOP_GROUPS=top_groups,
        GROUPS_2=groups_2,
        SIZE_2=size_2,
        LIMITED=top_groups < groups,
        BLOCK=block,
        num_warps=4,
    )
    return outputs


@_route.register_fake
def _empty_outputs(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    slots: int,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = x_TH.shape[0], weight_EH.shape[0]
    return (
        x_TH.new_empty(tokens, slots, dtype=torch.int64),
        x_TH.new_empty(tokens, slots, dtype=torch.float32),
        x_TH.new_empty(experts, tokens, dtype=torch.float32),
        x_TH.new_empty(tokens if sigmoid and renormalise else 0, dtype=torch.float32),
        x_TH.new_empty(experts + 2, dtype=torch.int64),
        x_TH.new_empty(tokens, dtype=torch.bool),
    )


@torch.library.custom_op("nmoe_kernels::route_backward", mutates_args=())
def _backward(
    grad_weights: Tensor | None,
    grad_logits_ET: Tensor | None,
    x_TH: Tensor,
    weight_EH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    logits_ET: Tensor | None,
    share_T: Tensor,
    valid_T: Tensor,
    wanted: list[bool],
    sigmoid: bool,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; empty if not wanted.

    logits_ET: needed by a softmax whose weights are not renormalised.
    """
    (tokens, width), experts = x_TH.shape, weight_EH.shape[0]
    grad_x, grad_weight = x_TH.new_empty(0), weight_EH.new_empty(0)
    grads = x_TH.new_empty(3, experts, tokens)
    rows = triton.next_power_of_2(experts)
    block = max(1, GRAD_ELEMENTS // rows)
    if tokens:
        kernels.logits_grad_kernel[(triton.cdiv(tokens, block),)](
            logits_ET,
            ids_TK,
            weights_TK,
            share_T,
            valid_T,
            None if grad_weights is None else grad_weights.contiguous(),
            None if grad_logits_ET is None else grad_logits_ET.contiguous(),
            grads,
            tokens,
            experts,
            experts * tokens,
            scale,
            SIGMOID=sigmoid,
            RENORMALISE=renormalise,
            FROM_WEIGHTS=grad_weights is not None,
            FROM_LOGITS=grad_logits_ET is not None,
            SLOTS=ids_TK.shape[1],
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    if wanted[0]:
        parts = _split(weight_EH, 2, x_TH.dtype)
        grad_x = _multiply(grads.flatten(0, 1).t(), parts.flatten(0, 1), x_TH.dtype)
    if wanted[1]:
        grad_weight = (
            _weight_grad(grads, x_TH, valid_T) if tokens else weight_EH.new_zeros(experts, width)
        )
    return grad_x, grad_weight


@_backward.register_fake
def _(
    grad_weights: Tensor | None,
    grad_logits_ET: Tensor | None,
    x_TH: Tensor,
    weight_EH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    logits_ET: Tensor | None,
    share_T: Tensor,
    valid_T: Tensor,
    wanted: list[bool],
    *_: Any,
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = (
        torch.empty_like(tensor) if want else tensor.new_empty(0)
        for tensor, want in zip((x_TH, weight_EH), wanted, strict=True)
    )
    return grad_x, grad_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TH, weight_EH, _, _, sigmoid, _, _, renormalise, scale = inputs
    ids, weights, logits_ET, share, counts, valid = output
    kept = None if sigmoid or renormalise else logits_ET
    ctx.save_for_backward(x_TH, weight_EH, ids, weights, kept, share, valid)
    ctx.settings = sigmoid, renormalise, scale
    ctx.mark_non_differentiable(ids, share, counts, valid)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, _: Any, grad_weights: Tensor | None, grad_logits_ET: Tensor | None, *__: Any
) -> tuple[Tensor | None, ...]:
    if grad_weights is None and grad_logits_ET is None:
        return (None,) * 9
    wanted = list(ctx.needs_input_grad[:2])
    grads = _backward(grad_weights, grad_logits_ET, *ctx.saved_tensors, wanted, *ctx.settings)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *given, *(None,) * 7


_route.register_autograd(_differentiate, setup_context=_save)


def _split(weight_EH: Tensor, highs: int, dtype: torch.dtype) -> Tensor:
    """[highs + 1, E, H] in `dtype`: copies of the weight, and what rounding them took off."""
    out = weight_EH.new_empty(highs + 1, *weight_EH.shape, dtype=dtype)
    size, block = weight_EH.numel(), 1024
    kernels.split_kernel[(triton.cdiv(size, block),)](
        weight_EH, out, size, HIGHS=highs, BLOCK=block
    )
    return out


def _multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right with sums in fp32, as `dtype`."""
    if dtype == left.dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype)


def _weight_grad(grads: Tensor, x_TH: Tensor, valid_T: Tensor) -> Tensor:
    """The gradient of the weight, fp32 [E, H]: sums over runs of tokens, then theirs."""
    (tokens, width), experts = x_TH.shape, grads.shape[1]
    launch = NARROW_GRAD if experts <= NARROW_GRAD.experts else WIDE_GRAD
    out = x_TH.new_empty(GRAD_PIECES, experts, width, dtype=torch.float32)
    piece = triton.cdiv(triton.cdiv(tokens, GRAD_PIECES), launch.tokens) * launch.tokens
    tiles = triton.cdiv(width, GRAD_COLUMNS), triton.cdiv(experts, launch.experts)
    kernels.weight_grad_kernel[(*tiles, GRAD_PIECES)](
        x_TH,
        grads,
        valid_T,
        out,
        tokens,
        width,
        experts,
        experts * tokens,
        piece,
        BT=launch.tokens,
        BH=GRAD_COLUMNS,
        BE=launch.experts,
        num_warps=launch.warps,
        num_stages=3,
    )
    return out.sum(0)
