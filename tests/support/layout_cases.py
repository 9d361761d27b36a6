"""Every layout whose training is compared with that of one process, in one table.

A row is a name, the model and what it sets. They train in the processes of few torchruns (`trained`
in tests/e2e/conftest.py), beside each model on one process and runs that stop and go on elsewhere.
Nothing divides evenly in the uneven models: 30 positions, 257 tokens and hidden widths of 50 and 17
over 2 and 4 ranks. The deep models have layers for pipelines. Batches hold 8 sequences.
"""

import json
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layout_runs import (
    TOLERANCE,
    Case,
    Rank,
    Results,
    assert_codes,
    assert_near,
    assert_near_state,
    metrics,
    saved,
)

Sets = dict[str, Any]

STEPS = 10
TERMINATED = 128 + signal.SIGTERM
COMMON: Sets = {
    "train.steps": STEPS,
    "train.batch_size": 8,
    "eval.every": 5,
    "eval.sequences": 10,
    "checkpoint.every": 5,
}
UNEVEN: Sets = {
    **COMMON,
    "model.heads": 4,
    "model.dense_width": 50,
    "model.moe.expert_width": 17,
    "train.seq_len": 30,
}
DEEP: Sets = {**COMMON, "model.layers": 5}
MODELS: dict[str, Sets] = {
    "mla": {**UNEVEN, "model.attention.q_lora_rank": 10},
    "gqa": {
        **UNEVEN,
        "model.attention.kind": "gqa",
        "model.heads": 8,
        "model.attention.kv_heads": 4,
        "model.tie_embeddings": "true",
        "model.moe.shared_experts": 2,
    },
    "deep": DEEP,
    "deep-tied": {**DEEP, "model.tie_embeddings": "true"},
    "four": {**COMMON, "model.heads": 4, "model.layers": 4, "train.seq_len": 30},
    # The seed with the clearest choice of experts under Muon, as that of `layout_runs` under AdamW.
    "muon": {**UNEVEN, "model.layers": 4, "optimizer.name": "muon", "run.seed": 4},
}


def split(dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, *, micro: int | None = None) -> Sets:
    """Sizes of the dimensions, and sequences of a micro-batch."""
    sizes: Sets = {"parallel.dp": dp, "parallel.tp": tp, "parallel.pp": pp, "parallel.ep": ep}
    return sizes if micro is None else {**sizes, "train.micro_batch_size": micro}


FSDP: Sets = {"parallel.fsdp": "true"}
ETP2: Sets = {"parallel.etp": 2}
ZERO_BUBBLE: Sets = {"parallel.pipeline.schedule": "zero-bubble"}
INTERLEAVED: Sets = {"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": 2}
RECOMPUTED: Sets = {"train.recompute": "layer"}


@dataclass(frozen=True)
class Row:
    """A layout of a model; its name begins with the model's."""

    name: str
    model: str
    sets: Sets

    @property
    def processes(self) -> int:
        """How many it takes."""
        sizes: list[int] = [self.sets[f"parallel.{name}"] for name in ("dp", "tp", "pp")]
        return sizes[0] * sizes[1] * sizes[2]

    @property
    def case(self) -> Case:
        """Its run."""
        return Case(self.name, self.processes, {**MODELS[self.model], **self.sets})


TABLE: dict[str, dict[str, Sets]] = {
    "mla": {
        "tp2": split(tp=2, micro=8),
        "tp4": split(tp=4, micro=8),
        "dp2-tp2-ep2": split(2, 2, ep=2, micro=4),
        "dp2-tp2-ep4": split(2, 2, ep=4, micro=4),
        "tp4-ep4": split(tp=4, ep=4, micro=8),
        "dp4-ep2-fsdp": {**split(4, ep=2, micro=2), **FSDP},
        "tp4-ep2-fsdp": {**split(tp=4, ep=2, micro=8), **FSDP},
        "dp2-tp2-fsdp": {**split(2, 2, micro=4), **FSDP},
    },
    "gqa": {
        "tp2": split(tp=2, micro=2),
        "dp2-tp2": split(2, 2, micro=1),
        "tp4-ep4": split(tp=4, ep=4, micro=2),
        "dp2-tp2-ep4-fsdp": {**split(2, 2, ep=4, micro=1), **FSDP},
    },
    "deep": {
        "pp2": split(pp=2, micro=2),
        "pp2-whole-share": split(pp=2),
        "pp2-recomputed-zero": {**split(pp=2, micro=2), **RECOMPUTED, **ZERO_BUBBLE},
        "pp4": split(pp=4, micro=2),
        "pp4-given": {**split(pp=4, micro=2), "parallel.pipeline.split": "[2,1,1,1]"},
        "dp2-pp2-ep2-zero": {**split(2, pp=2, ep=2, micro=1), **ZERO_BUBBLE},
        "dp2-pp2-ep2-interleaved": {**split(2, pp=2, ep=2, micro=1), **INTERLEAVED},
    },
    "deep-tied": {
        "pp2": split(pp=2, micro=2),
        "pp2-interleaved": {**split(pp=2, micro=2), **INTERLEAVED},
        "pp4-zero": {**split(pp=4, micro=2), **ZERO_BUBBLE},
        "dp2-pp2": split(2, pp=2, micro=1),
        "dp2-pp2-fsdp-interleaved": {**split(2, pp=2, micro=1), **FSDP, **INTERLEAVED},
        "tp2-pp2-ep2-zero": {**split(1, 2, 2, 2, micro=2), **ZERO_BUBBLE},
    },
    "four": {
        "dp2-tp2-pp2": split(2, 2, 2, micro=1),
        "dp2-tp2-pp2-ep2-zero": {**split(2, 2, 2, 2, micro=1), **ZERO_BUBBLE},
        "dp2-tp2-pp2-ep4": split(2, 2, 2, 4),
        "dp2-tp2-pp2-ep4-fsdp": {**split(2, 2, 2, 4, micro=2), **FSDP, **INTERLEAVED},
        "dp4-tp2-ep8": split(4, 2, ep=8),
        "tp2-etp2": {**split(tp=2), **ETP2},
        "dp2-tp2-ep2-etp2": {**split(2, 2, ep=2, micro=2), **ETP2},
        "dp2-tp2-etp2-fsdp": {**split(2, 2), **ETP2, **FSDP},
        "tp4-ep2-etp2": {**split(tp=4, ep=2), **ETP2},
        "tp4-etp4-recomputed": {**split(tp=4), **RECOMPUTED, "parallel.etp": 4},
        "dp2-tp2-pp2-ep2-etp2": {**split(2, 2, 2, 2, micro=1), **ETP2, **ZERO_BUBBLE},
    },
    "muon": {
        "dp2": split(2),
        "dp2-fsdp": {**split(2, micro=2), **FSDP},
        "tp2": split(tp=2),
        "dp2-ep2": split(2, ep=2),
        "pp2": split(pp=2, micro=4),
        "dp2-tp2-fsdp": {**split(2, 2), **FSDP},
        "dp2-tp2-pp2-ep4": split(2, 2, 2, 4, micro=2),
    },
}
ROWS = [
    Row(f"{model}-{name}", model, sets)
    for model, rows in TABLE.items()
    for name, sets in rows.items()
]


def journey(run: str, model: str, *stages: tuple[Sets, int | None]) -> list[Case]:
    """A run that goes on on another layout each time its last rank is asked to stop.

    Each stage: what it sets, and after how many steps of its own it is stopped, or None.
    """
    rows = [Row(f"{run}-{number}", model, sets) for number, (sets, _) in enumerate(stages, 1)]
    return [
        Case(
            row.name,
            row.processes,
            row.case.sets,
            run=run,
            signal=stop and (row.processes - 1, stop),
        )
        for row, (_, stop) in zip(rows, stages, strict=True)
    ]


JOURNEYS: dict[str, tuple[str, list[Case]]] = {
    run: (model, journey(run, model, *stages))
    for run, model, stages in (
        (
            "travel-tensor",
            "mla",
            [
                (split(tp=2), 2),
                (split(2, ep=2), 2),
                ({**split(2, 2, ep=2), **FSDP}, 2),
                (split(), 2),
                ({**split(2, 2, ep=4), **FSDP}, None),
            ],
        ),
        (
            "travel-pipeline",
            "deep-tied",
            [
                (split(pp=2, micro=2), 3),
                (split(micro=2), 3),
                ({**split(pp=4, micro=2), **ZERO_BUBBLE}, None),
            ],
        ),
        (
            "travel-experts",
            "four",
            [
                ({**split(2, 2), **ETP2, **FSDP}, 2),
                (split(2, ep=2), 3),
                ({**split(tp=2, pp=2, micro=2), **ETP2}, 2),
                (split(tp=4, ep=4), None),
            ],
        ),
        (
            "travel-muon",
            "muon",
            [({**split(2, 2), **FSDP}, 3), (split(2, pp=2, ep=2), 4), (split(tp=2), None)],
        ),
    )
}
"""Runs that go on on other layouts, with their models."""
STOPPED: dict[str, str] = {
    f"again-{name}": name for name in ("mla-tp4-ep2-fsdp", "deep-pp2", "muon-dp2-tp2-fsdp")
}
"""Runs that are stopped and go on on the same layout, and those that are never stopped."""


POOLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "four-processes": (4, ("mla", "gqa", "deep", "deep-tied")),
    "eight-processes": (8, ("four", "muon")),
}
"""Processes and models of each torchrun: few, as the start of one costs more than many cases."""


def cases_of(models: Collection[str]) -> list[Case]:
    """Models on one process, all their rows, and their runs that are stopped."""
    rows = {row.name: row for row in ROWS if row.model in models}
    again = []
    for run, name in STOPPED.items():
        if name in rows:
            case = rows[name].case
            stop = (case.processes - 1, 4)
            again.append(Case(f"{run}-1", case.processes, case.sets, run=run, signal=stop))
            again.append(Case(f"{run}-2", case.processes, case.sets, run=run))
    journeys = [cases for model, cases in JOURNEYS.values() if model in models]
    return [
        *(Case(model, 1, MODELS[model]) for model in models),
        *(row.case for row in rows.values()),
        *(case for cases in journeys for case in cases),
        *again,
    ]


class Trained:
    """All cases by name; `train` runs those of a pool, once, when one of them is asked for."""

    def __init__(self, train: Callable[[str], Results]) -> None:
        self._train = cache(train)
        self._pools = {
            case.name: pool for pool, (_, models) in POOLS.items() for case in cases_of(models)
        }

    def ranks(self, name: str) -> list[Rank]:
        """All ranks of a case."""
        return self._train(self._pools[name]).ranks(name)

    def run(self, name: str) -> Path:
        """The run folder of a case."""
        return self._train(self._pools[name]).run(name)


def assert_trains_as_one_process(
    pool: Results | Trained, name: str, model: str, steps: int
) -> None:
    """Losses, norms, loads, biases, validation, weights and moments are those of one process."""
    ranks = pool.ranks(name)
    assert_codes(ranks, 0)
    want, got = metrics(pool.run(model)), metrics(pool.run(name))
    assert_near(got, want, steps)
    for step in (steps // 2, steps):
        assert got[step]["loss/validation"] == pytest.approx(
            want[step]["loss/validation"], rel=TOLERANCE
        )
    first, *others = (rank.result["steps"] for rank in ranks)
    assert all(other == first for other in others), "every rank reports the same numbers"
    for mine, its in zip(first, pool.ranks(model)[0].result["steps"], strict=True):
        assert mine.keys() == its.keys()
        # No choice flips (see the seed), so loads are the same counts and biases the same bits.
        assert mine["load"] == its["load"]
        assert mine["bias"] == its["bias"]
    assert_near_state(saved(pool.run(name), steps), saved(pool.run(model), steps))
    record, its_record = (json.loads((pool.run(n) / "run.json").read_text()) for n in (name, model))
    assert record["parameters"] == its_record["parameters"]
