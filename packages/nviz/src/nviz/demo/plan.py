"""What each run of a demo is: its model, its fate, its attempts.

Runs come in groups of `SEEDS` that differ in their seed alone. Fates follow one another in a fixed
order, so that a dozen runs hold every state that a run folder can be in.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

SEEDS = 4
LARGEST_RUN = 48
# Most steps with expert loads that a run has, and most rows of one sealed part.
EXPERT_STEPS = 2000
PARTS = 20
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the machine that it is trained on."""

    name: str
    layers: int
    dense_layers: int
    experts: int
    top_k: int
    width: int
    parameters: int
    ranks: int
    device: str
    step_ms: float
    tokens_per_step: int

    @property
    def on_gpu(self) -> bool:
        """Whether it records MFU, memory and GPU telemetry."""
        return self.device != "cpu"


SHAPES = (
    Shape("quickstart", 4, 1, 16, 4, 128, 2_157_952, 1, "cpu", 240.0, 2048),
    Shape("moonlet", 12, 1, 64, 6, 1024, 7_100_000_000, 1, "NVIDIA H200", 610.0, 131_072),
    Shape("mixtral", 8, 0, 8, 2, 4096, 46_700_000_000, 4, "NVIDIA H200", 1900.0, 524_288),
    Shape("qwen", 16, 0, 32, 8, 2048, 30_500_000_000, 2, "NVIDIA B200", 1240.0, 262_144),
)
LARGEST = Shape(
    "deepseek", 61, 0, 256, 8, 7168, 671_000_000_000, 8, "NVIDIA B200", 5200.0, 4_194_304
)
FATES = (
    "completed",
    "restarted",
    "running",
    "failed",
    "interrupted",
    "non-finite",
    "dead experts",
    "completed",
    "completed",
    "silent",
    "recovered",
    "not started",
)
LR_CHOICES = (3e-3, 1e-3, 6e-4, 3e-4)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Steps `first` to `last` (both made) of one attempt, by `ranks` ranks.

    `sealed` says that it closed its files; `died_at` is the step at which the one before it ended.
    """

    number: int
    first: int
    last: int
    started_unix_s: float
    sealed: bool
    ranks: int
    died_at: int | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that decides the files of one run."""

    index: int
    run_id: str
    name: str
    group: str
    tags: tuple[str, ...]
    shape: Shape
    fate: str
    status: str
    seed: tuple[int, int]
    steps: int
    lr: float
    attempts: tuple[Attempt, ...]
    ended_unix_s: float | None
    updated_unix_s: float
    checkpoint_every: int
    eval_every: int
    seal_every: int
    expert_every: int

    @property
    def last_step(self) -> int:
        """The newest step of the newest attempt; 0 before the first."""
        return self.attempts[-1].last

    @property
    def model_seed(self) -> int:
        """The seed that tells the runs of a group apart."""
        return self.index % SEEDS


def draw_plan(index: int, steps: int, seed: int, now_unix_s: float) -> RunPlan:
    """The plan of run number `index` of `steps` steps; equal arguments give equal plans."""
    group = index // SEEDS
    drawn = np.random.default_rng([seed, index, 1])
    shape = LARGEST if index == LARGEST_RUN else SHAPES[group % len(SHAPES)]
    fate = FATES[(index + group) % len(FATES)]
    if fate == "recovered" and shape.ranks == 1:
        fate = "restarted"
    lr = LR_CHOICES[group // len(SHAPES) % len(LR_CHOICES)]
    every = max(1, steps // 20)
    last = _last_step(fate, steps, drawn)
    seconds = shape.step_ms / 1e3
    # Runs that say they are running end now; the others some time within the last month.
    ended = now_unix_s - (0.0 if fate == "running" else float(drawn.uniform(600, 30 * 86400)))
    started = ended - last * seconds * 1.1 - 30.0
    attempts = _attempts(fate, last, every, started, shape)
    group_name = f"{shape.name} lr {lr:g} #{group}"
    running = fate in ("running", "silent", "not started")
    return RunPlan(
        index=index,
        run_id=f"{shape.name}-{index:04d}",
        name=f"{shape.name} lr {lr:g} seed {index % SEEDS} #{index}",
        group=group_name,
        tags=("demo", shape.name, *(("baseline",) if group % 5 == 0 else ())),
        shape=shape,
        fate=fate,
        status="running" if running else _status(fate),
        seed=(seed, index),
        steps=steps,
        lr=lr,
        attempts=attempts,
        ended_unix_s=None if running else ended,
        updated_unix_s=ended,
        checkpoint_every=every,
        eval_every=max(1, steps // 10),
        seal_every=max(1000, steps // PARTS),
        expert_every=max(1, steps // EXPERT_STEPS),
    )


def _status(fate: str) -> str:
    return fate if fate in ("failed", "interrupted") else "completed"


def _last_step(fate: str, steps: int, drawn: np.random.Generator) -> int:
    if fate == "not started":
        return 0
    if fate in ("running", "silent", "failed", "interrupted"):
        return max(1, int(steps * drawn.uniform(0.35, 0.9)))
    return steps


def _attempts(
    fate: str, last: int, every: int, started_unix_s: float, shape: Shape
) -> tuple[Attempt, ...]:
    """One attempt, or two whose steps overlap: the second began at a checkpoint of the first."""
    seconds = shape.step_ms / 1e3
    ends_open = fate in ("running", "silent", "failed")
    if fate not in ("restarted", "recovered") or last < 2 * every:
        return (Attempt(1, 1, last, started_unix_s, not ends_open, shape.ranks),)
    died = min(last - 1, int(0.62 * last))
    resumed = died // every * every or max(1, died - 1)
    again = started_unix_s + died * seconds + 45.0
    # A lost rank leaves its group smaller; a killed process is started again as it was.
    ranks = shape.ranks - 1 if fate == "recovered" else shape.ranks
    return (
        Attempt(1, 1, died, started_unix_s, False, shape.ranks),
        Attempt(2, resumed + 1, last, again, True, ranks, died),
    )


def config_of(plan: RunPlan) -> dict[str, Any]:
    """The configuration that run.json holds, in nmoe-train's layout."""
    shape = plan.shape
    return {
        "run": {
            "name": plan.name,
            "tags": list(plan.tags),
            "group": plan.group,
            "seed": plan.model_seed,
            "device": "cuda" if shape.on_gpu else "cpu",
            "deterministic": True,
        },
        "model": {
            "width": shape.width,
            "layers": shape.layers,
            "dense_layers": shape.dense_layers,
            "heads": max(4, shape.width // 128),
            "attention": {"kind": "mla", "kv_lora_rank": shape.width // 2},
            "moe": {
                "experts": shape.experts,
                "top_k": shape.top_k,
                "shared_experts": 1,
                "score": "sigmoid",
                "bias_update_rate": 0.001,
                "balance_loss": 0.001,
                "z_loss": 0.0,
            },
        },
        "data": {"tokenizer": "bytes", "held_out": 0.05, "verify": True},
        "train": {
            "steps": plan.steps,
            "seq_len": 4096 if shape.on_gpu else 128,
            "batch_size": shape.tokens_per_step // (4096 if shape.on_gpu else 128),
            "clip_norm": 1.0,
        },
        "optimizer": {"lr": plan.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.2, "floor": 0.05},
        "precision": {"dtype": "bf16" if shape.on_gpu else "fp32"},
        "parallel": layout_of(plan),
        "checkpoint": {"every": plan.checkpoint_every, "keep": KEPT_CHECKPOINTS},
        "eval": {"every": plan.eval_every, "sequences": 256},
        "telemetry": {"seal_every": plan.seal_every},
    }


def layout_of(plan: RunPlan) -> dict[str, int]:
    """Sizes of the four dimensions."""
    return {"dp": plan.shape.ranks, "tp": 1, "pp": 1, "ep": plan.shape.ranks}
