"""Learning rate over tokens: warm-up, stable, decay (WSD; Hu et al. 2024), or cosine."""

import math

from nmoe_train.config import Config


def rate_factor(config: Config, tokens: int) -> float:
    """Share of the peak rate for the step that ends at `tokens` tokens seen.

    Counted at the end of the step, so the first step of a warm-up already moves the weights.
    """
    schedule, total = config.schedule, config.total_tokens
    warmup = config.schedule_tokens(schedule.warmup)
    if tokens < warmup:
        return tokens / warmup
    if schedule.kind == "cosine":
        progress = min(1.0, (tokens - warmup) / max(1, total - warmup))
        return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * progress)) / 2
    decay = config.schedule_tokens(schedule.decay)
    left = max(0, total - tokens)
    if left >= decay:
        return 1.0
    # The last step ends at `total`; it still moves, by the share that one step has of the decay.
    share = (left + config.tokens_per_step) / (decay + config.tokens_per_step)
    return schedule.floor + (1 - schedule.floor) * share
