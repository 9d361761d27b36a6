"""A checkpoint as other files has the same numbers, and a run goes on from it bitwise."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_train.checkpoint import convert_checkpoint, convert_weights, newest_sound_checkpoint
from nmoe_train.checkpoint.folder import write_checkpoint
from nmoe_train.cli import app
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome
from nmoe_train.model.box import Box
from nmoe_train.parallel import Layout
from nmoe_train.parallel.letters import Letters
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

Tiny = Callable[..., Config]
Run = Callable[..., Outcome]


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in ((n, t.reshape(-1)) for n, t in tensors.items())
    }


def tensors_of(run: Path) -> dict[str, Tensor]:
    checkpoint, problems = newest_sound_checkpoint(run / "checkpoints")
    assert checkpoint is not None and problems == []
    return dict(checkpoint.tensors())


def weights_of(folder: Path) -> dict[str, Tensor]:
    about = json.loads((folder / "weights.json").read_text())
    tensors: dict[str, Tensor] = {}
    for name, entry in about["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
        tensors |= load_file(folder / name)
    assert {n: about["tensors"][n] for n in tensors} == about["tensors"]
    return tensors


@pytest.fixture
def trained(tiny: Tiny, run: Run) -> Config:
    config = tiny(**{"train.steps": 4})
    run(config)
    return config


def test_weights_are_those_of_the_checkpoint_in_files_of_the_size(
    trained: Config, tmp_path: Path
) -> None:
    want = {n[6:]: t for n, t in tensors_of(trained.run.dir).items() if n.startswith("model.")}
    one = convert_weights(trained.run.dir, tmp_path / "one", None, 1e9)
    assert len(one) == 1
    assert hashes(weights_of(tmp_path / "one")) == hashes(want)
    many = convert_weights(trained.run.dir, tmp_path / "many", None, 30_000)
    assert len(many) > 3 and all(file.stat().st_size < 40_000 for file in many)
    assert hashes(weights_of(tmp_path / "many")) == hashes(want)
    assert "layers.1.moe.experts.3.down" in want


def test_matrices_are_cast_and_vectors_stay(trained: Config, tmp_path: Path) -> None:
    convert_weights(trained.run.dir / "checkpoints" / "step-00000002", tmp_path / "a", "bf16", 1e9)
    checkpoint = load_file(
        trained.run.dir / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    )
    for name, tensor in weights_of(tmp_path / "a").items():
        want = checkpoint[f"model.{name}"]
        assert torch.equal(tensor, want.bfloat16() if want.ndim > 1 else want), name


def test_a_run_goes_on_from_one_file_as_from_the_checkpoint(
    trained: Config, tiny: Tiny, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "moved"
    folder = convert_checkpoint(trained.run.dir, out)
    assert hashes(tensors_of(out)) == hashes(tensors_of(trained.run.dir))
    assert [p.name for p in folder.glob("*.safetensors")] == ["rank-00000.safetensors"]
    for place in (trained.run.dir, out):
        assert run(tiny(**{"run.dir": str(place)})).step == 6
    assert hashes(tensors_of(out)) == hashes(tensors_of(trained.run.dir))


def test_pieces_of_several_ranks_become_whole(tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    write_pieces(tmp_path / "run" / "checkpoints", whole)
    assert len(list((tmp_path / "run").rglob("rank-*.safetensors"))) == 2
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")["model.a"], whole)
    convert_weights(tmp_path / "run", tmp_path / "weights", None, 1e9)
    assert torch.equal(weights_of(tmp_path / "weights")["a"], whole)


def write_pieces(root: Path, whole: Tensor) -> None:
    """A checkpoint of two ranks that have half of a tensor each."""
    from threading import Thread

    from reshard import Ranks

    boxes = [Box((3 * rank, 0), (3, 8), (6, 8)) for rank in range(2)]
    meta: dict[str, Any] = {"tokens": 1, "fields": {}}

    def one(rank: int, letters: Letters) -> None:
        mine, box = {"model.a": boxes[rank].of(whole)}, {"model.a": boxes[rank]}
        write_checkpoint(root, 2, mine, meta, keep=1, groups=letters, boxes=box)

    layouts = [Layout(dp=2, rank=rank) for rank in range(2)]
    threads = [
        Thread(target=one, args=(rank, letters))
        for rank, letters in enumerate(Ranks(layouts).letters("save"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_the_command_names_what_it_wrote(trained: Config, tmp_path: Path) -> None:
    command = ["checkpoint", "convert", str(trained.run.dir)]
    out = tmp_path / "weights"
    found = CliRunner().invoke(app, [*command, str(out), "--weights-only", "--dtype", "bf16"])
    assert found.exit_code == 0 and found.output.startswith(f"{out}/weights-00001-of-00001.safe")
    assert weights_of(out)["head.weight"].dtype == torch.bfloat16
    found = CliRunner().invoke(app, [*command, str(tmp_path / "run2")])
    assert found.exit_code == 0 and "step-00000004" in found.output
    found = CliRunner().invoke(app, [*command, str(tmp_path / "b"), "--dtype", "bf16"])
    assert isinstance(found.exception, TrainError) and found.exception.code == "E-CONVERT"
    assert not (tmp_path / "b").exists()


def test_bad_input_is_one_line(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for source, out, dtype, code in (
        (trained.run.dir, tmp_path / "there", None, "E-CONVERT"),
        (trained.run.dir, tmp_path / "new", "int3", "E-CONVERT"),
        (tmp_path / "absent", tmp_path / "new", None, "E-CHECKPOINT-NOT-FOUND"),
    ):
        with pytest.raises(TrainError, match=code):
            convert_weights(source, out, dtype, 1e9)
    body = trained.run.dir / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    body.write_bytes(body.read_bytes()[:-1] + b"\xff")
    with pytest.raises(TrainError, match="E-CHECKPOINT-CORRUPT"):
        convert_checkpoint(trained.run.dir, tmp_path / "new")
    assert not (tmp_path / "new").exists()
