"""Checkpoints: folders that are either complete and verified, or invisible."""

from nmoe_train.checkpoint.folder import (
    Checkpoint,
    complete_checkpoints,
    newest_sound_checkpoint,
    write_checkpoint,
)
from nmoe_train.checkpoint.state import (
    gather_state,
    materialise_moments,
    owned_state,
    restore_state,
    state_boxes,
    state_places,
)

__all__ = [
    "Checkpoint",
    "complete_checkpoints",
    "gather_state",
    "materialise_moments",
    "newest_sound_checkpoint",
    "owned_state",
    "restore_state",
    "state_boxes",
    "state_places",
    "write_checkpoint",
]
