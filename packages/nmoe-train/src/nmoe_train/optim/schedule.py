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
    # One step longer than the ramp, so that the last step, which ends at `total`, still moves.
    length = total - warmup if schedule.kind == "cosine" else config.schedule_tokens(schedule.decay)
    left = max(0, total - tokens)
    if left >= length:
        return 1.0
    share = (left + config.tokens_per_step) / (length + config.tokens_per_step)
    if schedule.kind == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return schedule.floor + (1 - schedule.floor) * share
