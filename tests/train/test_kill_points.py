"""Kill -9 between any two system calls of a save: the newest checkpoint that could be is there."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import DeadlyFiles, takes_direct
from kills import in_child
from nmoe_train.checkpoint import (
    Saver,
    complete_checkpoints,
    newest_sound_checkpoint,
    write_checkpoint,
)
from nmoe_train.checkpoint.direct import BLOCK
from torch import Tensor

META: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
MOST_POINTS = 2000


@dataclass(frozen=True)
class Way:
    """How files are written: in chunks of so many bytes, tensors of so many numbers.

    A save has at least `points` before its checkpoint is complete.
    """

    chunk_bytes: int
    numbers: int
    points: int
    direct: bool = False

    def state(self, step: int) -> dict[str, Tensor]:
        return {f"model.{name}": torch.full((self.numbers,), float(step)) for name in "abcdefgh"}


CACHED = Way(chunk_bytes=48, numbers=150, points=200)
PAST_THE_CACHE = Way(chunk_bytes=2 * BLOCK, numbers=5000, points=50, direct=True)


@pytest.mark.parametrize(
    ("keep", "way"),
    [(1, CACHED), (2, CACHED), (1, PAST_THE_CACHE)],
    ids=["keep 1", "keep 2", "past the page cache"],
)
def test_a_kill_at_any_point_leaves_the_newest_checkpoint_that_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, way: Way
) -> None:
    if way.direct and not takes_direct(tmp_path):
        pytest.skip("the file system of this machine's temporary files takes no direct writes")
    monkeypatch.setattr("nmoe_train.checkpoint.body.CHUNK_BYTES", way.chunk_bytes)
    state = way.state
    survived: list[int] = []
    for deadly in range(1, MOST_POINTS):
        root = tmp_path / str(deadly)
        for step in (1, 2):
            write_checkpoint(root, step, state(step), META, keep=2)
        # An unfinished save of the same step, which is cleared away first.
        (root / "step-00000003").mkdir()
        (root / "step-00000003" / "rank-00000.safetensors").write_bytes(b"half")

        def save(root: Path = root, deadly: int = deadly) -> None:
            saver, tensors, files = Saver(root, keep), state(3), DeadlyFiles(deadly)
            files.install()
            saver.begin(3, tensors, META)
            saver.settle()
            whole_chunks = 8 * 4 * way.numbers // way.chunk_bytes
            assert files.direct_writes >= (whole_chunks if way.direct else 0)

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
    assert survived.count(2) > way.points
    assert survived.count(3) > 3
