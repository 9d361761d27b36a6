"""Checkpoints: folders that are either complete and verified, or invisible."""

from nmoe_train.checkpoint.folder import (
    Checkpoint,
    complete_checkpoints,
    newest_sound_checkpoint,
    write_checkpoint,
)
from nmoe_train.checkpoint.state import gather_state, owned_state, restore_state, state_boxes

__all__ = [
    "Checkpoint",
    "complete_checkpoints",
    "gather_state",
    "newest_sound_checkpoint",
    "owned_state",
    "restore_state",
    "state_boxes",
    "write_checkpoint",
]
