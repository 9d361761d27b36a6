"""Checkpoints: folders that are either complete and verified, or invisible."""

from nmoe_train.checkpoint.convert import convert_checkpoint, convert_weights
from nmoe_train.checkpoint.folder import (
    Checkpoint,
    newest_sound_checkpoint,
    remove_older,
    write_checkpoint,
)
from nmoe_train.checkpoint.saver import Saved, Saver
from nmoe_train.checkpoint.state import (
    gather_state,
    materialise_moments,
    owned_state,
    restore_state,
    state_boxes,
    state_places,
)
from nmoe_train.storage.folders import complete_checkpoints

__all__ = [
    "Checkpoint",
    "Saved",
    "Saver",
    "complete_checkpoints",
    "convert_checkpoint",
    "convert_weights",
    "gather_state",
    "materialise_moments",
    "newest_sound_checkpoint",
    "owned_state",
    "remove_older",
    "restore_state",
    "state_boxes",
    "state_places",
    "write_checkpoint",
]
