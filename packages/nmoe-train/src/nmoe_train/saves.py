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
    Checkpoint,
    Saved,
    Saver,
    complete_checkpoints,
    gather_state,
    newest_sound_checkpoint,
    owned_state,
    remove_older,
    state_boxes,
    state_places,
)
from nmoe_train.config import Config
from nmoe_train.config.fingerprint import fingerprint
from nmoe_train.interrupt import Interrupt
from nmoe_train.model import Transformer
from nmoe_train.parallel.groups import Groups, RankFailed
from nmoe_train.storage.folders import step_of
from nmoe_train.storage.mirror import Mirror, fetch_newest, mirror_url
from nmoe_train.storage.target import Target
from nmoe_train.storage.uploads import Orders, Uploads
from nmoe_train.telemetry import RunFolder

POLL_S = 0.05
PROGRESS_EVERY_S = 5.0
LEFT_EARLY = "left before the mirror had the newest checkpoint"


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
        self._config, self._groups, self._folder = config, groups, folder
        self._fields, self._tell, self._may_fail = fields, tell, may_fail
        settings = config.checkpoint
        self._limit = None if settings.limit_mb_s is None else settings.limit_mb_s * 1e6
        self._uploads = self._make_uploads() if groups.first and settings.mirror else None
        self._saver = Saver(
            folder.checkpoints,
            settings.keep,
            groups=groups,
            device=device,
            limit=self._limit,
            mirror=self._uploads,
        )
        self._times: dict[str, float] = {}
        self.step = 0
        """Of the newest save that was begun, or resumed from."""

    def _make_uploads(self) -> Uploads:
        settings = self._config.checkpoint
        return Uploads(
            Orders(
                self._folder.checkpoints,
                mirror_url(settings.mirror or "", self._folder.path),
                settings.mirror_patience_s,
                settings.mirror_keep,
                self._limit,
            )
        )

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest sound checkpoint, of the mirror where none is here, and what is wrong with
        newer ones. Raises what `newest_sound_checkpoint` and `fetch_newest` do."""
        fetch = self._fetch if self._uploads is not None else None
        return newest_sound_checkpoint(self._folder.checkpoints, self._groups, fetch)

    def _fetch(self) -> tuple[str | None, list[str]]:
        settings = self._config.checkpoint
        url = mirror_url(settings.mirror or "", self._folder.path)
        mirror = Mirror(Target(url, settings.mirror_patience_s))
        return fetch_newest(mirror, self._folder.checkpoints, self._tell, self._groups.guard)

    def start_mirror(self) -> None:
        """Lets what is complete here be mirrored, if it is not yet."""
        if self._uploads is not None:
            self._uploads.look()

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
        owned = owned_state(state, self._groups.layout, state_places(model), model.copies)
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
            "layout": self._groups.layout.sizes(),
            "loader": {"step": step, "seed": config.run.seed},
            "randomness": {"seed": config.run.seed},
        }

    def poll(self, step: int) -> None:
        """Notes, after `step` steps, what is complete by now."""
        self._note(self._saver.poll())
        self._note_mirror(step)

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
            self._alert(step, f"not saved, training goes on: {error}")

    def times(self) -> dict[str, float]:
        """What saves took since the last call, in milliseconds, for the record of a step."""
        times, self._times = self._times, {}
        return times

    def close(self) -> None:
        """Ends a run that has waited for its saves."""
        self._saver.leave(wait=True)

    def finish_mirror(self, step: int, interrupt: Interrupt) -> None:
        """Waits, after the last save, until the mirror has it, or an alert says why not.

        A signal ends that at once, and the next start goes on. All ranks call it. Where
        `interrupt` only notes a first signal, as in an elastic run, rank 0's ends the wait.
        """
        if self._config.checkpoint.mirror is None:
            return
        uploads, told_s, noted = self._uploads, time.monotonic(), interrupt.signal
        try:
            if uploads is not None:
                uploads.finish()
            while not self._groups.all_say(uploads is None or not uploads.alive):
                self._note_mirror(step)
                if uploads is not None and interrupt.signal != noted:
                    self._alert(step, LEFT_EARLY)
                    uploads.end()
                if uploads is not None and time.monotonic() - told_s > PROGRESS_EVERY_S:
                    told_s = time.monotonic()
                    self._tell(f"waiting for the mirror: {uploads.progress_text()}")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self._alert(step, LEFT_EARLY)
            raise
        finally:
            self.end_mirror(step)
        root, keep = self._folder.checkpoints, self._config.checkpoint.keep
        if uploads is not None and uploads.newest:
            remove_older(root, step_of(complete_checkpoints(root)[0].name), keep, uploads)

    def end_mirror(self, step: int) -> None:
        """Ends mirroring at once; what is complete there is noted, and the next start goes on."""
        if self._uploads is not None:
            self._uploads.end()
            self._note_mirror(step)

    def _note_mirror(self, step: int) -> None:
        for news in [] if self._uploads is None else self._uploads.news():
            if news["kind"] == "alert":
                self._alert(step, news["what"])
            else:
                fields = {key: news[key] for key in ("step", "bytes", "seconds")}
                self._folder.event("mirror", **fields)

    def _alert(self, step: int, what: str) -> None:
        self._tell(f"warning {what}")
        self._folder.event("alert", step=step, what=what)

    def abandon(self) -> None:
        """Calls the save under way off; others go on from a state that they choose."""
        with contextlib.suppress(Exception):
            self._saver.leave(wait=False)
        if self._uploads is not None:
            self._uploads.end()

    def leave(self, step: int, *, wait: bool) -> None:
        """Notes how the save under way ended, of a run that ends by an error of another kind."""
        with contextlib.suppress(OSError):
            try:
                saved = self._saver.leave(wait=wait)
            except Exception as problem:  # the run ends by another error, which is the one to raise
                self._folder.event("fault", step=step, what=f"not saved: {problem}")
            else:
                self._note(saved)
            self.end_mirror(step)

    def _note(self, saved: Saved | None) -> None:
        """Notes that a save is complete; its time stands in the record of the step being made."""
        if saved is not None:
            self._times["checkpoint/commit_ms"] = saved.commit_ms
            self._folder.event("checkpoint", step=saved.step, commit_ms=saved.commit_ms)
            self.start_mirror()
