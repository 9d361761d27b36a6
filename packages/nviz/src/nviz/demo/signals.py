"""The numbers of a demo run, a whole attempt at once.

Letters: S steps, L layers, E experts. Values keep `MANTISSA_BITS` bits, some three digits, so that
a million steps fit a small disk; every formula is a function of the step and of the run's seed.
"""

import numpy as np
from numpy.typing import NDArray

from nviz.demo.plan import Attempt, RunPlan

Array = NDArray[np.float64]
Columns = dict[str, NDArray[np.generic]]

MANTISSA_BITS = 11
DEAD_EXPERT = 5
PEAK_MEMORY_GIB = {"NVIDIA H200": 139.8, "NVIDIA B200": 178.4}
POWER_LIMIT_W = {"NVIDIA H200": 700.0, "NVIDIA B200": 1000.0}
GPU_SAMPLES = 600


def rounded(values: Array) -> Array:
    """`values` with the last bits of their mantissas cleared."""
    bits = values.astype(np.float32).view(np.uint32)
    keep = np.uint32((0xFFFFFFFF << (23 - MANTISSA_BITS)) & 0xFFFFFFFF)
    return (bits & keep).view(np.float32).astype(np.float64)


def generator(plan: RunPlan, *purpose: int) -> np.random.Generator:
    """Random numbers of a run for one purpose; purposes do not disturb each other."""
    return np.random.default_rng([*plan.seed, *purpose])


def step_times(plan: RunPlan, attempt: Attempt, rank: int) -> tuple[Array, Array]:
    """Milliseconds of each step, and the time at which it was recorded, by the rank's own clock."""
    drawn = generator(plan, 2, attempt.number, rank)
    count = attempt.last - attempt.first + 1
    slow = 1.12 if rank == plan.shape.ranks - 1 and rank > 0 else 1.0
    step_ms = plan.shape.step_ms * slow * drawn.lognormal(0.0, 0.04, count)
    step_ms[drawn.random(count) < 0.002] *= 3.0
    step_ms = rounded(step_ms)
    skew_s = 0.0 if rank == 0 else float(drawn.uniform(-0.4, 0.4))
    span = plan.updated_unix_s - attempt.started_unix_s
    seconds = np.cumsum(step_ms) / 1e3
    # The last attempt's last record is the run's last word.
    if attempt is plan.attempts[-1] and count:
        seconds *= span / max(float(seconds[-1]), 1e-9)
    return step_ms, np.round(attempt.started_unix_s + seconds + skew_s, 3)


def learning_rate(plan: RunPlan, steps: Array) -> Array:
    """Warm-up, plateau and linear decay, as the configuration says."""
    share = steps / plan.steps
    ramp = np.minimum(1.0, share / 0.05)
    decay = np.clip((1.0 - share) / 0.2, 0.05, 1.0)
    return plan.lr * ramp * decay


def cross_entropy(plan: RunPlan, steps: Array) -> Array:
    """Loss without noise: a power law of the share done, lower for larger models."""
    floor = 5.2 - 0.32 * np.log10(plan.shape.parameters)
    seed = generator(plan, 3)
    floor += 0.03 * seed.standard_normal()
    pace = 600.0 * (1e-3 / plan.lr) ** 0.35
    return np.asarray(floor + (9.0 - floor) * (1.0 + 40.0 * steps / pace) ** -0.42)


def _spikes(plan: RunPlan, steps: Array, drawn: np.random.Generator) -> Array:
    total = np.zeros(len(steps))
    for _ in range(int(drawn.integers(1, 5))):
        at = drawn.uniform(0.05, 0.95) * plan.steps
        after = steps - at
        total += np.where(
            after >= 0, drawn.uniform(0.2, 1.4) * np.exp(-np.maximum(after, 0) / 12.0), 0.0
        )
    return total


def scalars(plan: RunPlan, attempt: Attempt, rank: int) -> Columns:
    """Every recorded metric of an attempt on one rank; steps that lack one are NaN there, and
    `missing` in `folder` says which columns that concerns.
    """
    steps = np.arange(attempt.first, attempt.last + 1)
    at = steps.astype(np.float64)
    step_ms, time_unix_s = step_times(plan, attempt, rank)
    # Losses are the same on every rank: they are drawn without its number.
    found: Columns = {
        "step": steps,
        "time_unix_s": time_unix_s,
        "tokens": steps * plan.shape.tokens_per_step,
    }
    found |= _losses(plan, attempt, at)
    found |= _router(plan, at)
    found |= _speed(plan, attempt, rank, step_ms)
    if plan.shape.on_gpu:
        found |= _memory(plan, at, rank)
    return found


def _losses(plan: RunPlan, attempt: Attempt, at: Array) -> Columns:
    drawn = generator(plan, 4, attempt.number)
    count = len(at)
    spikes = _spikes(plan, at, generator(plan, 5))
    ce = cross_entropy(plan, at) + 0.03 * drawn.standard_normal(count) + spikes
    balance = 1.0 + 0.5 * np.exp(-at / 300.0) + 0.02 * drawn.standard_normal(count)
    z = 4.0 + 1.5 * (1.0 - np.exp(-at / 2000.0)) + 0.05 * drawn.standard_normal(count)
    norm = 0.35 + 3.0 * np.exp(-at / 80.0) + 0.05 * np.abs(drawn.standard_normal(count))
    norm += 2.5 * spikes
    lr = learning_rate(plan, at)
    if plan.fate in ("non-finite", "failed"):
        bad = _bad_rows(plan, attempt, count, drawn)
        ce[bad], norm[bad] = np.nan, np.inf
    return {
        "loss/ce": rounded(ce),
        "loss/train": rounded(ce + 0.001 * balance),
        "loss/balance": rounded(balance),
        "loss/z": rounded(z),
        "grad_norm": rounded(norm),
        "lr/dense": rounded(lr),
        "lr/expert": rounded(lr),
        "lr/router": rounded(lr),
    }


def _bad_rows(
    plan: RunPlan, attempt: Attempt, count: int, drawn: np.random.Generator
) -> NDArray[np.int64]:
    """Rows without a finite gradient: a few anywhere, or the last ten, after which a run fails."""
    if plan.fate == "failed":
        return np.arange(max(0, count - 10), count)
    return np.unique(drawn.integers(count // 10, count, size=min(count, 6)))


def _router(plan: RunPlan, at: Array) -> Columns:
    drawn = generator(plan, 6)
    count = len(at)
    experts = plan.shape.experts
    imbalance = 1.15 + 1.8 * np.exp(-at / (0.08 * plan.steps)) + 0.04 * drawn.random(count)
    entropy = np.log(experts) * (0.97 - 0.25 * np.exp(-at / (0.05 * plan.steps)))
    dead = np.where((plan.fate == "dead experts") & (at > 0.4 * plan.steps), 1, 0)
    return {
        "router/load_imbalance": rounded(imbalance + 0.6 * dead),
        "router/entropy": rounded(entropy + 0.004 * drawn.standard_normal(count)),
        "router/dead_experts": dead,
        "router/bias_range": rounded(0.08 * (1.0 - np.exp(-at / (0.2 * plan.steps)))),
        "router/invalid": np.zeros(count),
        "router/dropped": np.where(drawn.random(count) < 0.01, 3, 0),
    }


STAGES = {
    "time_ms/data": 0.01,
    "time_ms/forward": 0.24,
    "time_ms/dispatch": 0.06,
    "time_ms/expert": 0.13,
    "time_ms/combine": 0.05,
    "time_ms/backward": 0.41,
    "time_ms/optimizer": 0.08,
}


def _speed(plan: RunPlan, attempt: Attempt, rank: int, step_ms: Array) -> Columns:
    drawn = generator(plan, 7, attempt.number, rank)
    count = len(step_ms)
    rate = plan.shape.tokens_per_step / step_ms * 1e3
    found: Columns = {"step_ms": step_ms, "tokens_per_s": rounded(rate)}
    for name, share in STAGES.items():
        found[name] = rounded(step_ms * share * drawn.lognormal(0.0, 0.05, count))
    if plan.shape.on_gpu:
        base = 0.41 * plan.shape.step_ms
        found["mfu"] = rounded(base / step_ms)
        found["overlap_ratio"] = rounded(np.clip(0.72 + 0.05 * drawn.standard_normal(count), 0, 1))
    found["active_ranks"] = np.full(count, attempt.ranks)
    return found


def _memory(plan: RunPlan, at: Array, rank: int) -> Columns:
    full = PEAK_MEMORY_GIB[plan.shape.device]
    level = 0.62 + 0.05 * (rank % 3) + 0.08 * np.minimum(1.0, at / max(1.0, 0.02 * plan.steps))
    return {
        "memory/allocated_gib": rounded(full * (level - 0.12)),
        "memory/reserved_gib": rounded(full * (level + 0.06)),
        "memory/peak_gib": rounded(full * level),
    }


def expert_loads(
    plan: RunPlan, steps: NDArray[np.int64], part: int, attempt: Attempt
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens (S, L, E) of each expert and the balancing bias (S, L, E) at `steps`."""
    shape = plan.shape
    layers, experts = shape.layers - shape.dense_layers, shape.experts
    taste_LE = generator(plan, 8).standard_normal((layers, experts))
    done_S = (steps / plan.steps)[:, None, None]
    drawn = generator(plan, 9, attempt.number, part)
    share = np.exp((0.15 + 0.9 * np.exp(-done_S / 0.06)) * taste_LE)
    if plan.fate == "dead experts":
        share[steps > 0.4 * plan.steps, -1, DEAD_EXPERT % experts] = 0.0
    tokens = shape.tokens_per_step * shape.top_k
    mean = tokens * share / share.sum(axis=-1, keepdims=True)
    noise = drawn.standard_normal(mean.shape, dtype=np.float32)
    load = np.maximum(0, np.rint(mean + np.sqrt(mean) * noise)).astype(np.int64)
    # Steps of the update rate, as the balancing rule makes them.
    updates = np.rint(-60.0 * taste_LE * (1.0 - np.exp(-done_S / 0.1)))
    return load, updates * 0.001


def gpu_samples(plan: RunPlan) -> Columns | None:
    """NVML readings of every rank over the whole run, or None on a CPU."""
    if not plan.shape.on_gpu or plan.last_step == 0:
        return None
    per_rank = [_gpu_of(plan, rank) for rank in range(plan.shape.ranks)]
    return {name: np.concatenate([part[name] for part in per_rank]) for name in per_rank[0]}


def _gpu_of(plan: RunPlan, rank: int) -> Columns:
    device, count = plan.shape.device, min(GPU_SAMPLES, 10 + plan.last_step)
    drawn = generator(plan, 10, rank)
    first = plan.attempts[0].started_unix_s
    limit, full = POWER_LIMIT_W[device], PEAK_MEMORY_GIB[device]
    busy = np.clip(0.94 + 0.03 * drawn.standard_normal(count), 0.0, 1.0)
    # Short idle spells: checkpoints and evaluations.
    busy[drawn.random(count) < 0.04] = 0.05
    hot = 12.0 if rank == plan.shape.ranks - 1 and plan.index % 3 == 0 else 0.0
    temperature = 38.0 + 26.0 * busy + hot + 1.5 * drawn.standard_normal(count)
    clock = np.where(temperature > 74.0, 1410.0, 1830.0)
    return {
        "time_unix_s": np.round(np.linspace(first, plan.updated_unix_s, count), 3),
        "rank": np.full(count, rank),
        "host": np.full(count, f"node-{rank // 8:02d}"),
        "device": np.full(count, rank % 8),
        "name": np.full(count, device),
        "utilisation_percent": np.round(100.0 * busy),
        "memory_used_gib": rounded(full * (0.55 + 0.3 * np.minimum(1.0, np.arange(count) / 20.0))),
        "memory_total_gib": np.full(count, full),
        "power_w": np.round(limit * (0.2 + 0.75 * busy) + 8.0 * drawn.standard_normal(count), 1),
        "power_limit_w": np.full(count, limit),
        "temperature_c": np.round(temperature),
        "clock_sm_mhz": clock,
        "clock_memory_mhz": np.full(count, 3201.0),
    }
