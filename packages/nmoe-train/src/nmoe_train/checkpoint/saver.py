"""Saves beside the training: it waits for a copy of its tensors in host memory, and no longer.

A thread of each rank then writes that rank's file; the ranks tell each other by letters, as no
thread but the training's may use its process groups. One save is under way at a time: the next one
waits for it, so that host memory holds one copy of the state.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe_train.checkpoint.folder import Mirrored, write_checkpoint
from nmoe_train.checkpoint.snapshot import HostSnapshot
from nmoe_train.model.box import Box
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.letters import Letters

POLL_S = 0.05
PATIENCE_S = 3.0
"""How long a run that has failed waits for other ranks, which may be gone, to write their part."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete, and the milliseconds from the call to that."""

    step: int
    commit_ms: float


class _Save(threading.Thread):
    """One save under way."""

    def __init__(self, step: int, letters: Letters) -> None:
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.letters = step, letters
        self.began_s = time.perf_counter()
        self.commit_ms = 0.0
        self.problem: BaseException | None = None
        self.arguments: dict[str, Any] = {}
        self._told = False
        self.memory: HostSnapshot | None = None
        """What this thread frees, where nobody waits for it any more."""

    @property
    def ends_process(self) -> bool:
        """Whether it has failed with what is no error of the save, and nobody is told."""
        return self.problem is not None and not isinstance(self.problem, Exception)

    def told(self) -> Saved | None:
        """That it is complete, the first time."""
        first, self._told = not self._told, True
        return Saved(self.step, self.commit_ms) if first else None

    def raise_problem(self) -> None:
        """Raises what it has failed with, if it has."""
        problem, self.problem = self.problem, None
        try:
            if problem is not None:
                raise problem
        finally:
            # The error holds this frame: without a cycle it goes, with all that it holds, at once.
            del problem

    def run(self) -> None:
        try:
            write_checkpoint(groups=self.letters, step=self.step, **self.arguments)
        except BaseException as error:
            self.problem = error
        self.arguments = {}
        self.commit_ms = (time.perf_counter() - self.began_s) * 1e3
        if self.memory is not None:
            self.memory.close()


class Saver:
    """Writes the checkpoints of one process under `root`; every rank has one, and saves alike.

    `keep`, `limit` and `mirror` are those of `write_checkpoint`. A save that failed is told by
    `failed`, and raised by `settle`.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        *,
        groups: Groups = ALONE,
        device: torch.device | None = None,
        limit: float | None = None,
        mirror: Mirrored | None = None,
    ) -> None:
        self._root, self._groups = root, groups
        self._policy = {"keep": keep, "limit": limit, "mirror": mirror}
        self._snapshot = HostSnapshot(device or torch.device("cpu"))
        self._saves = 0
        self._under_way: _Save | None = None
        self._letters_before: Letters | None = None

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        boxes: Mapping[str, Box] | None = None,
    ) -> None:
        """Copies the tensors and begins to write them; they may change once this returns.

        The arguments are those of `write_checkpoint`. The save before must be settled.
        """
        assert self._under_way is None
        self._saves += 1
        save = _Save(step, Letters(self._groups, f"saves/{self._saves}"))
        save.arguments = {
            "root": self._root,
            "tensors": self._snapshot.take(tensors),
            "meta": dict(meta),
            "boxes": boxes,
            **self._policy,
        }
        self._under_way = save
        save.start()

    @property
    def failed(self) -> bool:
        """Whether the save under way has come to nothing, on this rank."""
        save = self._under_way
        return save is not None and not save.is_alive() and save.problem is not None

    def poll(self) -> Saved | None:
        """The save under way, if it is complete by now; each is returned once, here or at its end.

        It stays under way until all ranks settle it.
        """
        save = self._under_way
        if save is None or save.is_alive() or save.problem is not None:
            return None
        return save.told()

    def settle(self) -> Saved | None:
        """Waits for the save under way, if there is one; raises what it has failed with.

        All ranks call it, after the same step. While one still writes they ask each other, so that
        a rank that is gone is noticed: `E-PEER`.
        """
        save = self._under_way
        if save is None:
            return None
        while not (save.ends_process or self._groups.all_say(not save.is_alive())):
            save.join(POLL_S)
            self._groups.guard()
        return self._result(save)

    def _result(self, save: _Save) -> Saved | None:
        self._under_way = None
        save.raise_problem()
        # Every rank has taken part in this save, and so none reads those before.
        if self._letters_before is not None:
            self._letters_before.forget()
        self._letters_before = save.letters
        return save.told()

    def leave(self, *, wait: bool) -> Saved | None:
        """Ends a run that has failed: waits for the save under way, or calls it off.

        Other ranks are given `PATIENCE_S`. Raises what the save has failed with, if it has.
        """
        save = self._under_way
        if save is None:
            self._snapshot.close()
            return None
        if wait:
            save.join(None if self._groups.alone else PATIENCE_S)
        if not save.is_alive():
            try:
                return self._result(save)
            finally:
                self._snapshot.close()
        self._under_way, save.memory = None, self._snapshot
        save.letters.call_off()
        return None
