"""What a run's result depends on: the fields that must not change under a checkpoint.

The number of steps, folders, micro-batches, ranks, saving and telemetry may change between attempts
of a run; the model, the data and the optimization may not, unless the user says so. Where an expert
takes only so many tokens from a rank, that bound and the ranks do change the result.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nmoe_train.config.schema import Config

RESULT_FIELDS: dict[str, Any] = {
    "run": {"seed"},
    "model": True,
    "train": {"seq_len", "batch_size", "clip_norm"},
    "optimizer": True,
    "schedule": True,
    "precision": True,
}


def result_fields(
    config: Config, data_fingerprint: str, layout: Mapping[str, int]
) -> dict[str, Any]:
    """The fields that change the result, flat: `model.width` -> 256. Values are JSON's.

    `layout` holds the sizes of parallelism by name.
    """
    tree = config.model_dump(mode="json", include=RESULT_FIELDS)
    fields = {**_flatten(tree, ""), "data": data_fingerprint}
    rdep = config.parallel.rdep
    if rdep.capacity == "exact":
        return fields
    bounds: dict[str, Any] = {"rdep.capacity": rdep.capacity, "rdep.overflow": rdep.overflow}
    return fields | {f"parallel.{name}": value for name, value in {**bounds, **layout}.items()}


def fingerprint(fields: dict[str, Any]) -> str:
    """SHA-256 of the fields, in hex."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _flatten(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
