"""What a run's result depends on: the fields that must not change under a checkpoint.

The number of steps, folders, micro-batches, saving and telemetry may change between attempts of a
run; the model, the data and the optimization may not, unless the user says so.
"""

import hashlib
import json
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


def result_fields(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """The fields that change the result, flat: `model.width` -> 256. Values are JSON's."""
    tree = config.model_dump(mode="json", include=RESULT_FIELDS)
    return {**_flatten(tree, ""), "data": data_fingerprint}


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
