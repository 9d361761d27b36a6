"""A checkpoint is complete and what was written, or it is not there."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_data.loader import Loader
from nmoe_train.checkpoint import (
    complete_checkpoints,
    gather_state,
    newest_sound_checkpoint,
    owned_state,
    restore_state,
    write_checkpoint,
)
from nmoe_train.config import Config
from nmoe_train.data import TrainingData, to_step
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.model.moe_block import router_bias
from nmoe_train.optim import build_optimizer
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups, Result
from nmoe_train.step import train_step
from nmoe_train.telemetry.timers import StageTimer
from safetensors.torch import load_file
from torch import Tensor

META: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
State = dict[str, Tensor]
Pair = tuple[Transformer, torch.optim.Optimizer]


def small(value: float = 0.0) -> State:
    """A state of two tensors."""
    return {"model.a": torch.full((3, 4), float(value)), "model.b": torch.arange(5.0) + value}


def write(root: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        write_checkpoint(root, step, small(step), META, keep=keep)


def steps_in(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(root)]


@pytest.fixture
def trained(
    tiny: Callable[..., Config], build: Callable[..., Transformer], data: TrainingData
) -> Callable[..., Pair]:
    """A model and its optimizer after some steps."""

    def make(steps: int = 2, **overrides: Any) -> Pair:
        config = tiny(**overrides)
        model = build(config)
        optimizer = build_optimizer(model, config.optimizer)
        loader = Loader(data.train, seq_len=16, seed=0)
        for step in range(steps):
            timer = StageTimer(torch.device("cpu"))
            share = to_step(loader.batch(step, 4))
            train_step(model, optimizer, share, config, (step + 1) * 64, timer)
        return model, optimizer

    return make


def test_a_round_trip_keeps_every_bit(trained: Callable[..., Pair], tmp_path: Path) -> None:
    model, optimizer = trained()
    write_checkpoint(tmp_path, 2, gather_state(model, optimizer), META, keep=1)
    checkpoint, problems = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and problems == []
    assert checkpoint.step == 2
    assert checkpoint.meta["tokens"] == 128

    other, its_optimizer = trained(steps=0, **{"run.seed": 9})
    restore_state(other, its_optimizer, checkpoint.tensors(), 2)
    names = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, names[name]), name
        before, after = optimizer.state[names[name]], its_optimizer.state[parameter]
        assert before.keys() == after.keys()
        for key in before:
            assert torch.equal(before[key], after[key]), (name, key)
            assert before[key].dtype == after[key].dtype, (name, key)
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name


def test_tensors_are_named_by_meaning_and_single_experts(trained: Callable[..., Pair]) -> None:
    model, optimizer = trained()
    state = gather_state(model, optimizer)
    stack = model.moe_blocks()[1].experts
    for expert in range(4):
        for matrix in ("gate_up", "down"):
            name = f"layers.1.moe.experts.{expert}.{matrix}"
            # Gate and up are apart in a checkpoint.
            saved = {key: state[key].flatten(0, -2) for key in state if key.endswith(name)}
            assert torch.equal(saved[f"model.{name}"], getattr(stack, matrix)[expert])
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = optimizer.state[getattr(stack, matrix)][moment]
                assert torch.equal(saved[f"optimizer.{moment}.{name}"], whole[expert])
                assert whole[expert].any()
    assert not [name for name in state if name.endswith(("experts.gate_up", "experts.down"))]
    held = sum(tensor.numel() for tensor in state.values())
    weights = sum(parameter.numel() for parameter in model.parameters())
    biases = sum(buffer.numel() for buffer in model.buffers())
    assert held == 3 * weights + biases


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (4, 1), (4, 2), (4, 4), (2, 2)])
def test_of_what_several_ranks_hold_one_writes_it(
    trained: Callable[..., Pair], dp: int, ep: int
) -> None:
    whole = gather_state(*trained())
    written: list[str] = []
    for rank in range(dp):
        layout = Layout(dp=dp, ep=ep, rank=rank)
        elsewhere = set(range(4)) - set(layout.local_experts(4))
        parts = tuple(f".experts.{expert}." for expert in elsewhere)
        held = {name: t for name, t in whole.items() if not any(p in name for p in parts)}
        written += owned_state(held, layout)
    assert sorted(written) == sorted(whole)


def test_only_the_tensors_asked_for_are_read(tmp_path: Path) -> None:
    write(tmp_path, 2)
    checkpoint, _ = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None
    tensors = checkpoint.tensors()
    assert sorted(tensors) == ["model.a", "model.b"]
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    assert len(tensors) == 2, "the names stand in meta.json"
    with pytest.raises(FileNotFoundError):
        tensors["model.a"]


def test_the_router_bias_is_saved_as_it_is(trained: Callable[..., Pair], tmp_path: Path) -> None:
    model, optimizer = trained(steps=1, **{"precision.dtype": "bf16"})
    bias = router_bias(model.moe_blocks()[1])
    # No such number exists in bf16.
    bias[0] = 1.000001
    write_checkpoint(tmp_path, 2, gather_state(model, optimizer), META, keep=1)
    file = load_file(tmp_path / "step-00000002" / "rank-00000.safetensors")
    saved = file["model.layers.1.moe.experts.router.bias"]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, bias)
    assert saved[1:].any()
    assert {tensor.dtype for tensor in file.values()} == {torch.float32}

    other, its_optimizer = trained(steps=0)
    held = router_bias(other.moe_blocks()[1])
    restore_state(other, its_optimizer, file, 2)
    assert router_bias(other.moe_blocks()[1]) is held, "updated in place, not replaced"
    assert torch.equal(held, bias)


def test_meta_says_what_is_inside(tmp_path: Path) -> None:
    write(tmp_path, 7)
    folder = tmp_path / "step-00000007"
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["schema_version"] == 3
    assert meta["step"] == 7
    assert meta["tensors"]["model.a"] == {
        "file": "rank-00000.safetensors",
        "shape": [3, 4],
        "dtype": "float32",
    }
    content = (folder / "rank-00000.safetensors").read_bytes()
    assert meta["files"] == {
        "rank-00000.safetensors": {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
    }
    assert {path.name for path in folder.iterdir()} == {
        "rank-00000.safetensors",
        "meta.json",
        "COMPLETE",
    }


def test_there_is_nothing_where_nothing_was_written(tmp_path: Path) -> None:
    assert newest_sound_checkpoint(tmp_path / "absent") == (None, [])
    (tmp_path / "step-1").mkdir()
    (tmp_path / "other").mkdir()
    assert newest_sound_checkpoint(tmp_path) == (None, [])


def test_a_folder_without_complete_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    (tmp_path / "step-00000004" / "COMPLETE").unlink()
    checkpoint, problems = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2
    assert problems == []


def test_a_half_written_folder_is_written_anew(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    folder = tmp_path / "step-00000004"
    (folder / "COMPLETE").unlink()
    (folder / "rank-00001.safetensors").write_bytes(b"left over")
    write_checkpoint(tmp_path, 4, small(44), META, keep=10)
    checkpoint, _ = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None
    assert torch.equal(checkpoint.tensors()["model.a"], torch.full((3, 4), 44.0))
    assert not (folder / "rank-00001.safetensors").exists()


def test_a_peer_lost_after_the_commit_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    class LosesPeers(Groups):
        """Groups of rank 0, whose peers are gone once it has completed the folder."""

        def first_does(self, action: Callable[[], Result]) -> Result:
            result = action()
            if steps_in(tmp_path)[:1] == [4]:
                raise TrainError("E-PEER", "another rank has left", "start again")
            return result

    write(tmp_path, 2)
    with pytest.raises(TrainError, match="E-PEER"):
        write_checkpoint(tmp_path, 4, small(4), META, keep=1, groups=LosesPeers(Layout()))
    assert steps_in(tmp_path) == [4, 2]
    checkpoint, problems = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 4 and problems == []


class Crash(BaseException):
    """The end of the process, as far as the code under test can tell."""


def killed(_: object) -> None:
    """The end of a process without a last word."""
    os._exit(9)


def raised(_: object) -> None:
    """An error or an interrupt, after which the code cleans up."""
    raise Crash


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("end", [killed, raised])
def test_a_crash_at_any_flush_leaves_a_sound_checkpoint(
    tmp_path: Path, fork: Callable[..., Any], keep: int, end: Callable[[object], None]
) -> None:
    flush = os.fsync
    survived: list[int] = []
    for deadly in range(1, 100):
        root = tmp_path / str(deadly)
        write(root, 2)
        left = deadly

        def dying(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                end(descriptor)
            flush(descriptor)

        def write_until_death(root: Path = root) -> None:
            os.fsync = dying
            write(root, 4, keep=keep)

        finished = fork(write_until_death).wait()[0] == 0
        if end is raised and not finished:
            folders = [path.name for path in root.iterdir()]
            complete = [path.name for path in complete_checkpoints(root)]
            assert sorted(folders) == sorted(complete) or "step-00000004" in complete
        checkpoint, problems = newest_sound_checkpoint(root)
        assert checkpoint is not None and problems == []
        survived.append(checkpoint.step)
        whole = small(checkpoint.step)
        assert all(torch.equal(checkpoint.tensors()[name], whole[name]) for name in whole)
        write(root, 4, keep=keep)
        assert steps_in(root) == ([4] if keep == 1 else [4, 2])
        if finished:
            break
    assert finished
    assert survived.count(2) >= 3, "between the tensors' flush and that of COMPLETE"
    assert survived == sorted(survived)


def damage_body(folder: Path) -> Path:
    file = folder / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    return file


def truncate_body(folder: Path) -> Path:
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return file


def remove_body(folder: Path) -> Path:
    (folder / "rank-00000.safetensors").unlink()
    return folder / "rank-00000.safetensors"


def truncate_meta(folder: Path) -> Path:
    file = folder / "meta.json"
    file.write_text(file.read_text()[:50])
    return file


def empty_meta(folder: Path) -> Path:
    (folder / "meta.json").write_text("{}")
    return folder / "meta.json"


def list_for_meta(folder: Path) -> Path:
    (folder / "meta.json").write_text("[1, 2]")
    return folder / "meta.json"


def binary_meta(folder: Path) -> Path:
    (folder / "meta.json").write_bytes(b"\xff\x00\xfe")
    return folder / "meta.json"


def folder_for_body(folder: Path) -> Path:
    """A file that the system cannot read, even for the super-user."""
    file = remove_body(folder)
    file.mkdir()
    return file


def folder_for_meta(folder: Path) -> Path:
    (folder / "meta.json").unlink()
    (folder / "meta.json").mkdir()
    return folder / "meta.json"


def other_update_count(folder: Path) -> Path:
    file = folder / "meta.json"
    file.write_text(file.read_text().replace('"updates": 2', '"updates": 3'))
    return file


DAMAGES = pytest.mark.parametrize(
    "damage",
    [
        damage_body,
        truncate_body,
        remove_body,
        truncate_meta,
        empty_meta,
        list_for_meta,
        binary_meta,
        folder_for_body,
        folder_for_meta,
        other_update_count,
    ],
)


@DAMAGES
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], Path]
) -> None:
    write(tmp_path, 2, 4)
    file = damage(tmp_path / "step-00000004")
    checkpoint, problems = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2
    assert len(problems) == 1
    assert problems[0].startswith("E-CHECKPOINT-CORRUPT: ")
    assert str(file) in problems[0]


@DAMAGES
def test_with_all_damaged_the_run_does_not_start_over_in_silence(
    tmp_path: Path, damage: Callable[[Path], Path]
) -> None:
    write(tmp_path, 2, 4)
    for step in (2, 4):
        damage(tmp_path / f"step-{step:08d}")
    with pytest.raises(TrainError) as caught:
        newest_sound_checkpoint(tmp_path)
    assert caught.value.code == "E-CHECKPOINT-CORRUPT"
    assert "none of the 2 checkpoints" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    folder = tmp_path / "step-00000004"
    for name in ("meta.json", "rank-00000.safetensors"):
        content = (folder / name).read_bytes()
        for place in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            (folder / name).write_bytes(bytes(flipped))
            checkpoint, problems = newest_sound_checkpoint(tmp_path)
            assert checkpoint is not None and checkpoint.step == 2, (name, place)
            assert len(problems) == 1
        (folder / name).write_bytes(content)
    checkpoint, _ = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 4


def test_a_damaged_checkpoint_is_written_anew_when_its_step_comes_again(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    damage_body(tmp_path / "step-00000004")
    write(tmp_path, 4)
    checkpoint, problems = newest_sound_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 4
    assert problems == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        write(tmp_path, step, keep=keep)
        assert steps_in(tmp_path) == list(range(step, max(0, step - keep), -1))
    assert len(list(tmp_path.iterdir())) == keep


def test_a_save_that_fails_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 2, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nmoe_train.checkpoint.folder._save_tensors", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            write(tmp_path, 4, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("file", ["meta.json", "COMPLETE"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_late_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: BaseException
) -> None:
    import nmoe_train.checkpoint.folder as module

    write(tmp_path, 2, keep=1)
    real = module.atomic_write

    def failing(path: Path, content: bytes) -> None:
        if path.name == file:
            raise error
        real(path, content)

    monkeypatch.setattr(module, "atomic_write", failing)
    with pytest.raises(type(error)):
        write(tmp_path, 4, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_incomplete_older_folders_are_removed_and_do_not_count_as_kept(tmp_path: Path) -> None:
    write(tmp_path, 2, 4, keep=2)
    for step in (3, 5):
        folder = tmp_path / f"step-{step:08d}"
        shutil.copytree(tmp_path / "step-00000004", folder)
        (folder / "COMPLETE").unlink()
    write(tmp_path, 6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_checkpoint_never_pushes_out_a_sound_one(tmp_path: Path, keep: int) -> None:
    write(tmp_path, 2, 8)
    damage_body(tmp_path / "step-00000008")
    for step in (4, 6):
        # Steps made again after the resume from step 2.
        write(tmp_path, step, keep=keep)
        checkpoint, problems = newest_sound_checkpoint(tmp_path)
        assert checkpoint is not None and checkpoint.step == step
        assert len(problems) == 1
        assert steps_in(tmp_path)[: keep + 1] == [8, *range(step, step - 2 * keep, -2)]
        assert len(steps_in(tmp_path)) == keep + 1
    write(tmp_path, 8, keep=keep)
    assert steps_in(tmp_path) == [8, 6, 4][:keep]
    assert newest_sound_checkpoint(tmp_path)[1] == []


def give_version(folder: Path, version: int) -> None:
    """Makes the checkpoint one of another format, with checksums that fit."""
    meta = json.loads((folder / "meta.json").read_text()) | {"schema_version": version}
    content = json.dumps(meta).encode()
    (folder / "meta.json").write_bytes(content)
    (folder / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("version", [2, 4])
def test_a_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path, version: int) -> None:
    write(tmp_path, 2, 4, 6)
    give_version(tmp_path / "step-00000004", version)
    assert newest_sound_checkpoint(tmp_path)[1] == [], "an older folder's format is no matter"
    damage_body(tmp_path / "step-00000006")
    with pytest.raises(TrainError) as caught:
        newest_sound_checkpoint(tmp_path)
    assert caught.value.code == "E-CHECKPOINT-VERSION"
    assert str(tmp_path / "step-00000004") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.dense_width": 40}, "mlp"),
        ({"model.moe.experts": 8}, "experts"),
        ({"model.tie_embeddings": True}, "head.weight"),
        ({"model.layers": 3}, "layers.2"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(
    trained: Callable[..., Pair], change: dict[str, Any], named: str
) -> None:
    state = {name: tensor.clone() for name, tensor in gather_state(*trained()).items()}
    model, optimizer = trained(steps=0, **change)
    with pytest.raises(TrainError) as caught:
        restore_state(model, optimizer, state, 2)
    assert caught.value.code == "E-CHECKPOINT-STATE"
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
