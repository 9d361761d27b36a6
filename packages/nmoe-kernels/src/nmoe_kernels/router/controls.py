"""What keeps experts evenly used: losses, the bias update, capacity, and measures of the load.

Losses come without their coefficient and as means (over tokens, or over sequences), so that the
caller's weight for them does not depend on how a batch is cut. Nothing here reads a tensor on the
host.

Letters: T tokens, K experts per token, E experts, R sequences.
"""

import dataclasses
import math

import torch
from torch import Tensor

from nmoe_kernels.errors import KernelError
from nmoe_kernels.router.config import RouterConfig, Routing
from nmoe_kernels.router.reference import TINY, choice_scores, choice_weights, count_load, top_ids


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, equation 5); 0 for T = 0."""
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)


def count_choices(ids_TK: Tensor, rows: int, experts: int) -> Tensor:
    """How many assignments each of `rows` sequences of equal length gave each expert, fp32 [R, E].

    What capacity dropped (id E) counts nowhere. Raises KernelError if `rows` does not divide T.
    """
    _check_rows(ids_TK.shape[0], rows)
    ids = ids_TK.reshape(rows, -1)
    # One more column takes the assignments that were dropped.
    chosen = torch.zeros(rows, experts + 1, device=ids.device)
    chosen.scatter_add_(1, ids, torch.ones_like(ids, dtype=chosen.dtype))
    return chosen[:, :experts].contiguous()


def sequence_balance_loss(
    scores_TE: Tensor,
    ids_TK: Tensor,
    rows: int,
    *,
    length: int | None = None,
    chosen_RE: Tensor | None = None,
) -> Tensor:
    """The sequence-wise balance loss of DeepSeek-V3 (equations 17 to 20), mean over sequences.

    `rows` is the number of sequences: tokens lie sequence after sequence, each of T / rows tokens.
    For one sequence the loss is sum_i f_i P_i, with f_i = E / (K * length) times the tokens that
    chose expert i, and P_i the mean of its score normalised over experts. It is 1 when even.
    The gradient flows through P only. Where these tokens are a part of each sequence, pass the
    whole `length` and `count_choices` summed over all parts: the results of parts then add up, as
    do their gradients. Raises KernelError if `rows` does not divide T.
    """
    tokens, experts = scores_TE.shape
    _check_rows(tokens, rows)
    if chosen_RE is None:
        chosen_RE = count_choices(ids_TK, rows, experts)
    length = length or max(tokens // rows, 1)
    fraction = chosen_RE.to(scores_TE.dtype) * (experts / (ids_TK.shape[1] * length))
    mean_score = _normalised(scores_TE).reshape(rows, -1, experts).sum(1) / length
    return (fraction * mean_score).sum(-1).mean()


def _check_rows(tokens: int, rows: int) -> None:
    if rows < 1 or tokens % rows:
        raise KernelError(
            "E-BALANCE-ROWS",
            f"{tokens} tokens do not make {rows} equal sequences",
            "pass their number",
        )


def load_balance_loss(scores_TE: Tensor, load_E: Tensor) -> Tensor:
    """The load-balancing loss of Switch Transformer (equation 4): E * sum_i f_i P_i; 1 when even.

    f_i is expert i's share of `load_E`, which may be that of this micro-batch or of the global
    batch (summed over ranks by the caller); P_i is the mean over these T tokens of its normalised
    score.
    """
    tokens, experts = scores_TE.shape
    share = load_E.to(scores_TE.dtype) / load_E.sum().clamp_min(1)
    mean_score = _normalised(scores_TE).sum(0) / max(tokens, 1)
    return experts * (share * mean_score).sum()


def update_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Adds rate * sign(mean(load) - load) to the bias, in place (auxiliary-loss-free balancing).

    `load_E` is the load of the whole step over all ranks, each token counted once. Raises
    KernelError for a bias that is not fp32: in bf16 a rate of 1e-3 is lost beside a bias of 1.
    """
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise KernelError(
            "E-BIAS-DTYPE", f"the router bias is {bias_E.dtype}", "keep it in float32"
        )
    with torch.no_grad():
        # In integers the sign is exact, so that an expert at the mean does not drift.
        load = load_E.to(torch.int64)
        bias_E.add_((load.sum() - load * load.numel()).sign(), alpha=rate)


def load_stats(load_E: Tensor) -> dict[str, Tensor]:
    """How even a load [..., E] is, as tensors of shape [...] left on the device.

    imbalance: greatest over mean, 1 when even, 0 without tokens. entropy: of the shares, in nats,
    at most log(E). dead_experts: int64, experts without a token.
    """
    load = load_E.to(torch.float32)
    total = load.sum(-1, keepdim=True).clamp_min(1.0)
    share = load / total
    return {
        "imbalance": share.amax(-1) * load.shape[-1],
        "entropy": torch.special.entr(share).sum(-1),
        "dead_experts": (load_E == 0).sum(-1),
    }


def apply_capacity(routing: Routing, config: RouterConfig, bias_E: Tensor | None = None) -> Routing:
    """Limits an expert to ceil(capacity_factor * T * K / E) assignments; returns a new Routing.

    Earlier tokens go first, so that dropping never lets a later token change an earlier one.
    "drop": what is beyond the limit gets id E and weight 0; the other weights of the token stay as
    they were. "reroute": it goes to the token's next best experts that have room, tokens in order,
    one rank after another, and is dropped if there is none; the token's weights are those of its
    new experts. A slot that is dropped keeps its share when weights are renormalised. `bias_E` must
    be what the choice was made with. `load_E` keeps the load before the limit; `dropped` counts
    what was dropped.
    """
    if config.capacity_factor is None:
        return routing
    tokens, slots = routing.ids_TK.shape
    capacity = math.ceil(config.capacity_factor * tokens * slots / config.experts)
    place_TK = _place_in_queue(routing.ids_TK.flatten(), config.experts).view(tokens, slots)
    ids_TK = routing.ids_TK.masked_fill(place_TK >= capacity, config.experts)
    if config.overflow == "reroute":
        ids_TK = _reroute(
            ids_TK, choice_scores(routing.scores_TE, config, bias_E), config, capacity
        )
    dropped_TK = ids_TK == config.experts
    shares_TK = choice_weights(
        routing.scores_TE, torch.where(dropped_TK, routing.ids_TK, ids_TK), config
    )
    return dataclasses.replace(
        routing,
        ids_TK=ids_TK,
        weights_TK=shares_TK.masked_fill(dropped_TK, 0.0),
        dropped=dropped_TK.sum(),
    )


def _reroute(ids_TK: Tensor, choice_TE: Tensor, config: RouterConfig, capacity: int) -> Tensor:
    """Offers each token's unplaced slots the experts of rank K, K + 1, ..., one a round."""
    experts = config.experts
    reachable = config.top_groups * (experts // config.groups)
    ranked_TE = top_ids(choice_TE, reachable)
    used = count_load(ids_TK, experts + 1)
    for rank in range(config.top_k, reachable):
        lost_TK = ids_TK == experts
        slot_T1 = lost_TK.int().argmax(-1, keepdim=True)
        offer_T = torch.where(lost_TK.any(-1), ranked_TE[:, rank], experts)
        fits_T = _place_in_queue(offer_T, experts) < capacity - used[offer_T]
        taken_T1 = torch.where(fits_T, offer_T, experts).unsqueeze(-1)
        now_T1 = ids_TK.gather(1, slot_T1)
        ids_TK = ids_TK.scatter(1, slot_T1, torch.where(now_T1 == experts, taken_T1, now_T1))
        used = count_load(ids_TK, experts + 1)
    return ids_TK


def _place_in_queue(ids: Tensor, experts: int) -> Tensor:
    """How many earlier entries of the 1-D `ids` are the same, for each entry."""
    ordered, order = torch.sort(ids, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
    places = torch.arange(ids.numel(), device=ids.device) - starts[ordered]
    return torch.empty_like(order).scatter_(0, order, places)


def _normalised(scores_TE: Tensor) -> Tensor:
    # The floor keeps a row whose sigmoids all underflow finite.
    return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(TINY)
