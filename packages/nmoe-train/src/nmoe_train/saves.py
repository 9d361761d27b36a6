"""The checkpoints of a run in progress: begun, awaited, and noted in the run's record.

The loop says when; here is what a checkpoint holds beside its tensors, what a save cost the step
that waited for it, and which events tell how it ended.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from nmoe_train.checkpoint import (
    Saved,
    Saver,
    gather_state,
    owned_state,
    state_boxes,
    state_places,
)
from nmoe_train.config import Config
from nmoe_train.config.fingerprint import fingerprint
from nmoe_train.model import Transformer
from nmoe_train.parallel.groups import Groups, RankFailed
from nmoe_train.telemetry import RunFolder


class Saves:
    """What one rank saves; every rank has one, and calls it after the same steps.

    `fields`: the configuration that changes the result. `tell` shows a line to the user.
    `may_fail`: a save that fails is an alert, as the ranks hold the state in memory too.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        folder: RunFolder,
        device: torch.device,
        fields: dict[str, Any],
        tell: Callable[[str], None],
        *,
        may_fail: bool,
    ) -> None:
        self._config, self._layout, self._folder = config, groups.layout, folder
        self._fields, self._tell, self._may_fail = fields, tell, may_fail
        self._saver = Saver(
            folder.checkpoints, config.checkpoint.keep, groups=groups, device=device
        )
        self._times: dict[str, float] = {}
        self.step = 0
        """Of the newest save that was begun, or resumed from."""

    @property
    def failed(self) -> bool:
        """Whether the save under way has come to nothing, on this rank."""
        return self._saver.failed

    def begin(self, step: int, updates: int, model: Transformer, optimizer: Any) -> None:
        """Begins to save the state after `step` steps; the training waits while it is copied.

        It also waits for the save before, if that one is not finished yet. Raises what `finish`
        does.
        """
        started_s = time.perf_counter()
        self.finish(step, needed=False)
        state = gather_state(model, optimizer)
        owned = owned_state(state, self._layout, state_places(model), model.copies)
        self._saver.begin(step, owned, self._meta(step, updates), state_boxes(model))
        self.step = step
        self._times["checkpoint/stall_ms"] = (time.perf_counter() - started_s) * 1e3

    def _meta(self, step: int, updates: int) -> dict[str, Any]:
        config = self._config
        return {
            "tokens": step * config.tokens_per_step,
            "updates": updates,
            "steps": config.train.steps,
            "fingerprint": fingerprint(self._fields),
            "fields": self._fields,
            "layout": self._layout.sizes(),
            "loader": {"step": step, "seed": config.run.seed},
            "randomness": {"seed": config.run.seed},
        }

    def poll(self) -> None:
        """Notes the save under way, if it is complete by now."""
        self._note(self._saver.poll())

    def finish(self, step: int, *, needed: bool) -> None:
        """Waits, after `step` steps, for the save under way, if any; raises what it failed with.

        A disk that refuses is an alert where saves may fail, unless this one is `needed`: to end
        the run, or where no memory is kept.
        """
        try:
            self._note(self._saver.settle())
        except (OSError, RankFailed) as error:
            if needed or not self._may_fail:
                raise
            what = f"not saved, training goes on: {error}"
            self._tell(f"warning {what}")
            self._folder.event("alert", step=step, what=what)

    def times(self) -> dict[str, float]:
        """What saves took since the last call, in milliseconds, for the record of a step."""
        times, self._times = self._times, {}
        return times

    def close(self) -> None:
        """Ends a run that has waited for its saves."""
        self._saver.leave(wait=True)

    def abandon(self) -> None:
        """Calls the save under way off; others go on from a state that they choose."""
        with contextlib.suppress(Exception):
            self._saver.leave(wait=False)

    def leave(self, step: int, *, wait: bool) -> None:
        """Notes how the save under way ended, of a run that ends by an error of another kind."""
        with contextlib.suppress(OSError):
            try:
                saved = self._saver.leave(wait=wait)
            except Exception as problem:
                self._folder.event("fault", step=step, what=f"not saved: {problem}")
            else:
                self._note(saved)

    def _note(self, saved: Saved | None) -> None:
        """Notes that a save is complete; its time stands in the record of the step being made."""
        if saved is not None:
            self._times["checkpoint/commit_ms"] = saved.commit_ms
            self._folder.event("checkpoint", step=saved.step, commit_ms=saved.commit_ms)
