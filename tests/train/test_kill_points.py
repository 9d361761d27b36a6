"""Kill -9 between any two system calls of a save: the newest checkpoint that could be is there."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import DeadlyFiles
from kills import in_child
from nmoe_train.checkpoint import (
    Saver,
    complete_checkpoints,
    newest_sound_checkpoint,
    write_checkpoint,
)
from torch import Tensor

META: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
MOST_POINTS = 2000


def state(step: int) -> dict[str, Tensor]:
    return {f"model.{name}": torch.full((150,), float(step)) for name in "abcdefgh"}


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_point_leaves_the_newest_checkpoint_that_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    monkeypatch.setattr("nmoe_train.checkpoint.body.CHUNK_BYTES", 48)
    survived: list[int] = []
    for deadly in range(1, MOST_POINTS):
        root = tmp_path / str(deadly)
        for step in (1, 2):
            write_checkpoint(root, step, state(step), META, keep=2)
        # An unfinished save of the same step, which is cleared away first.
        (root / "step-00000003").mkdir()
        (root / "step-00000003" / "rank-00000.safetensors").write_bytes(b"half")

        def save(root: Path = root, deadly: int = deadly) -> None:
            saver, tensors = Saver(root, keep), state(3)
            DeadlyFiles(deadly).install()
            saver.begin(3, tensors, META)
            saver.settle()

        code = in_child(save)
        complete = (root / "step-00000003" / "COMPLETE").exists()
        checkpoint, problems = newest_sound_checkpoint(root)
        assert checkpoint is not None and problems == [], deadly
        assert checkpoint.step == (3 if complete else 2), deadly
        found = checkpoint.tensors()
        want = state(checkpoint.step)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want), deadly
        survived.append(checkpoint.step)
        # The next start makes the step again, and all is as if nothing had been.
        if deadly % 20 == 1:
            write_checkpoint(root, 3, state(3), META, keep=keep)
            assert len(complete_checkpoints(root)) == keep
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert survived == sorted(survived), "once there, it stays"
    assert survived.count(2) > 200
    assert survived.count(3) > 3
