"""The router in plain PyTorch, and the truth for its kernels.

Logits are x @ W^T in fp32 whatever the dtype of x; scores are their softmax or sigmoid. The choice
is made on scores plus the bias, inside the best groups of experts only, and the lowest index wins a
tie. The weights are the scores without the bias, renormalised and scaled. A row with a NaN or an
infinite logit is routed as if its logits were all 0, and is counted.

Letters: T tokens, H width, E experts, K experts per token, G groups of experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmoe_kernels.router.config import RouterConfig, Routing, scores_of

# Keeps the division finite when every chosen sigmoid underflows; DeepSeek-V3's code has the same.
TINY = 1e-20


def route_reference(
    x_TH: Tensor, weight_EH: Tensor, config: RouterConfig, bias_E: Tensor | None = None
) -> Routing:
    """Routes T tokens without any limit on capacity; see `route` for arguments."""
    logits_TE, valid_T = _Logits.apply(x_TH, weight_EH)
    scores_TE = scores_of(logits_TE, config.score)
    ids_TK = top_ids(choice_scores(scores_TE, config, bias_E), config.top_k)
    return Routing(
        ids_TK=ids_TK,
        weights_TK=choice_weights(scores_TE, ids_TK, config),
        logits_TE=logits_TE,
        score=config.score,
        load_E=count_load(ids_TK, config.experts),
        invalid=(~valid_T).sum(),
        valid_T=valid_T,
        dropped=torch.zeros((), dtype=torch.int64, device=x_TH.device),
    )


def choice_scores(scores_TE: Tensor, config: RouterConfig, bias_E: Tensor | None) -> Tensor:
    """The scores [T, E] that the choice is made on: biased, and -inf outside a token's best groups.

    A group's score is the sum of its two best biased scores for sigmoid (DeepSeek-V3, section
    2.1.2, whose K / top_groups is 2) and its best one for softmax (DeepSeek-V2, section 2.2.2).
    """
    choice_TE = scores_TE.detach()
    if bias_E is not None:
        # An expert whose bias is NaN comes last.
        bias_E = bias_E.detach()
        choice_TE = choice_TE + torch.where(bias_E.isnan(), -torch.inf, bias_E)
    if config.top_groups == config.groups:
        return choice_TE
    grouped_TGE = choice_TE.unflatten(-1, (config.groups, -1))
    summed = min(2 if config.score == "sigmoid" else 1, grouped_TGE.shape[-1])
    best_TG = grouped_TGE.topk(summed, dim=-1).values.sum(-1)
    open_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    open_TG.scatter_(-1, top_ids(best_TG, config.top_groups), True)
    return grouped_TGE.masked_fill(~open_TG.unsqueeze(-1), -torch.inf).flatten(-2)


def top_ids(choice_TE: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the k greatest of each row, greatest first; the lowest index wins a tie.

    `torch.topk` breaks ties as it likes, so it is given integers without any: the fp32 value's
    place in the order of all floats, then the index. (-0 would come after +0; a sum of a score and
    a bias is never -0.)
    """
    experts = choice_TE.shape[-1]
    bits = choice_TE.float().contiguous().view(torch.int32)
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    index = torch.arange(experts - 1, -1, -1, device=choice_TE.device)
    return (order * experts + index).topk(k, dim=-1).indices


def choice_weights(scores_TE: Tensor, ids_TK: Tensor, config: RouterConfig) -> Tensor:
    """The weights [T, K] of the chosen experts: their scores, renormalised and scaled."""
    chosen_TK = scores_TE.gather(-1, ids_TK)
    if config.renormalise:
        chosen_TK = chosen_TK / (chosen_TK.sum(-1, keepdim=True) + TINY)
    return chosen_TK * config.scale


def count_load(ids_TK: Tensor, experts: int) -> Tensor:
    """Tokens per expert, int64 [E]; `bincount` would read its greatest id on the host."""
    ids = ids_TK.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids, torch.ones_like(ids)
    )


class _Logits(torch.autograd.Function):
    """x @ W^T in fp32, with rows that are not finite made 0 in the result and in every gradient.

    It keeps x in its own dtype for the backward, not an fp32 copy, and a bad row of x must not
    reach the gradient of W as 0 * NaN.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> tuple[Tensor, Tensor]:
        weight_EH = weight_EH.to(_compute_dtype(weight_EH))
        raw_TE = x_TH.to(weight_EH.dtype) @ weight_EH.t()
        valid_T = raw_TE.isfinite().all(-1)
        ctx.save_for_backward(x_TH, weight_EH, valid_T)
        ctx.mark_non_differentiable(valid_T)
        return torch.where(valid_T[:, None], raw_TE, 0.0), valid_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_EH, valid_T = ctx.saved_tensors
        valid_T1 = valid_T[:, None]
        grad_TE = torch.where(valid_T1, grad_TE, 0.0)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(valid_T1, grad_TE @ weight_EH, 0.0).to(x_TH.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_TE.t() @ torch.where(valid_T1, x_TH, 0.0).to(grad_TE.dtype)
        return grad_x, grad_weight


def _compute_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
