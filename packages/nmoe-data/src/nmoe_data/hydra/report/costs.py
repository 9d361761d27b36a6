"""What labelling gave and cost, and what an injected command did: straight from the labels."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nmoe_data.hydra.injection import read_pairs
from nmoe_data.hydra.labels import INJECTION_NAME, SCORED, Labels
from nmoe_data.hydra.report.measures import mean_estimate

ALL = "all"


def label_section(labels: Labels) -> dict[str, Any]:
    """Returns counts by status and detail, per judge tokens, cost and latency, and the last run."""
    rows = labels.labels.drop(["scores", "expected", "reason"]).to_pylist()
    classes = Counter((row["status"], row["detail"]) for row in rows)
    run = labels.summary.get("run", {})
    return {
        "documents": labels.documents.num_rows,
        "classes": [
            {"status": status, "detail": detail, "count": count}
            for (status, detail), count in sorted(classes.items())
        ],
        "judges": [
            _judge(model, [row for row in rows if row["model"] == model]) for model in labels.models
        ],
        "replies_per_s": run.get("replies_per_s"),
        "failures": run.get("failures", {}),
        "stopped_by": labels.summary.get("stopped_by"),
        "budget": labels.summary.get("budget", {}),
    }


def _judge(model: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    waits = [row["latency_s"] for row in rows if row["status"] == SCORED]
    return {
        "model": model,
        "labels": len(rows),
        "scored": len(waits),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "completion_tokens": sum(row["completion_tokens"] for row in rows),
        "cost": float(sum(row["cost"] for row in rows)),
        "median_latency_s": float(np.median(waits)) if waits else None,
    }


def injection_section(folder: Path, names: list[str], seed: int) -> list[dict[str, Any]]:
    """Returns the mean shift under attack by judge, defence and dimension; [] if not measured.

    Dimensions: each, and "all", the mean over them. Attacks: all together.
    """
    path = folder / INJECTION_NAME
    if not path.is_file():
        return []
    table = read_pairs(path)
    return [
        entry
        for model in sorted(table["model"].unique().to_pylist())
        for defended in (True, False)
        for entry in _shifts(table, model, defended, names, seed)
    ]


def _shifts(
    table: pa.Table, model: str, defended: bool, names: list[str], seed: int
) -> list[dict[str, Any]]:
    rows = [
        row for row in table.to_pylist() if row["model"] == model and row["defended"] == defended
    ]
    pairs = [row for row in rows if row["clean_scores"] and row["attacked_scores"]]
    shift = np.array(
        [np.subtract(row["attacked_scores"], row["clean_scores"]) for row in pairs], np.float64
    ).reshape(len(pairs), len(names))
    columns = {ALL: shift.mean(axis=1), **{name: shift[:, i] for i, name in enumerate(names)}}
    return [
        {
            "model": model,
            "defended": defended,
            "dimension": name,
            "pairs": len(pairs),
            "unscored": len(rows) - len(pairs),
            "shift": mean_estimate(values, seed).to_json(),
        }
        for name, values in columns.items()
    ]
