"""The MoE layer written once more, from its definition, one token and one expert at a time in fp64.

It shares no code with the package. Autograd through it gives the true gradients. Capacity is a
plain queue: assignments in order, an expert that is full refuses.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class Answer:
    """What the oracle found; `gaps`: the smallest difference of scores that decided a token's."""

    y: Tensor
    choice: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor
    gaps: Tensor


def layer(x, router, gate_up, down, config, bias=None, ids=None):
    """The layer's output for tokens x [T, H], all fp64; through experts `ids` if given."""
    tokens = [token_choice(x_t, router, config, bias) for x_t in x]
    chosen = [choice[0] for choice in tokens] if ids is None else ids.tolist()
    weights = [
        token_weights(choice[1], c, config) for choice, c in zip(tokens, chosen, strict=True)
    ]
    y = [
        sum((w * expert(x_t, gate_up[e], down[e]) for w, e in zip(w_t, c, strict=True)), 0 * x_t)
        for x_t, w_t, c in zip(x, weights, chosen, strict=True)
    ]
    return Answer(
        y=torch.stack(y),
        choice=torch.tensor([choice[0] for choice in tokens]),
        weights=torch.stack([torch.stack(w) for w in weights]),
        scores=torch.stack([choice[1] for choice in tokens]),
        logits=torch.stack([choice[2] for choice in tokens]),
        gaps=torch.tensor([choice[3] for choice in tokens]),
    )


def expert(x_t, gate_up, down):
    """down(silu(gate(x)) * up(x)) of one token."""
    half = gate_up.shape[0] // 2
    gate, up = gate_up[:half] @ x_t, gate_up[half:] @ x_t
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def token_choice(x_t, router, config, bias):
    """(ids, scores, logits, gap) of one token."""
    logits = router @ x_t
    if config.score == "softmax":
        exps = torch.exp(logits - logits.max())
        scores = exps / exps.sum()
    else:
        scores = 1 / (1 + torch.exp(-logits))
    biased = (scores if bias is None else scores + bias).tolist()
    open_experts, group_gap = open_group_members(biased, config)
    ranked = sorted(open_experts, key=lambda e: (-biased[e], e))
    ordered = [biased[e] for e in ranked[: config.top_k + 1]]
    gaps = [high - low for high, low in pairwise(ordered)]
    return ranked[: config.top_k], scores, logits, min([*gaps, group_gap])


def open_group_members(biased, config):
    """The experts of a token's best groups, and how clear the choice of groups was."""
    size = len(biased) // config.groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.groups)]
    if config.top_groups == config.groups:
        return [e for group in groups for e in group], float("inf")
    summed = 2 if config.score == "sigmoid" else 1
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:summed]) for group in groups]
    ranked = sorted(range(config.groups), key=lambda g: (-worth[g], g))
    gap = worth[ranked[config.top_groups - 1]] - worth[ranked[config.top_groups]]
    return sorted(e for g in ranked[: config.top_groups] for e in groups[g]), gap


def token_weights(scores, chosen, config):
    """The weights of one token's experts: unbiased scores, renormalised and scaled."""
    picked = [scores[e] for e in chosen]
    total = sum(picked) if config.renormalise else 1.0
    return [p / total * config.scale for p in picked]


def within_capacity(ids, experts, capacity):
    """Ids with `experts` in the place of what comes to a full expert, token after token."""
    taken, kept = [0] * experts, []
    for row in ids.tolist():
        kept.append([])
        for e in row:
            fits = taken[e] < capacity
            kept[-1].append(e if fits else experts)
            taken[e] += fits
    return kept, taken


def rerouted(ids, ranked, experts, capacity):
    """The same, then rank by rank each token offers one lost slot to the expert of that rank."""
    kept, taken = within_capacity(ids, experts, capacity)
    for rank in range(ids.shape[1], len(ranked[0])):
        for t, row in enumerate(kept):
            e = ranked[t][rank]
            if experts in row and taken[e] < capacity:
                row[row.index(experts)] = e
                taken[e] += 1
    return kept


def relative_error(got, want):
    """Norm of the difference over the norm of what is wanted."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()
