"""A checkpoint as other files has the same numbers, and a run goes on from it bitwise."""

import hashlib
import json
import resource
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


def weights_in_one_file(source: str | Path, out: Path) -> list[Path]:
    return convert_weights(source, out, None, 1e9)


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


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_matrices_are_cast_and_vectors_stay(
    trained: Config, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    convert_weights(trained.run.dir / "checkpoints" / "step-00000002", tmp_path / "a", name, 1e9)
    checkpoint = load_file(
        trained.run.dir / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    )
    for weight, tensor in weights_of(tmp_path / "a").items():
        want = checkpoint[f"model.{weight}"]
        want = want.to(dtype) if want.ndim > 1 else want
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), weight


def test_whole_numbers_are_not_cast_and_files_are_filled_by_what_is_written(tmp_path: Path) -> None:
    tensors = {f"model.{name}": torch.randn(50, 50) for name in "abcd"}
    tensors["model.table"] = torch.arange(6).reshape(2, 3)
    meta: dict[str, Any] = {"tokens": 1, "fields": {}}
    write_checkpoint(tmp_path / "run" / "checkpoints", 2, tensors, meta, keep=1)
    # Two matrices of 5,000 bytes each fit into a file, where four bytes a number would be one.
    files = convert_weights(tmp_path / "run", tmp_path / "out", "bf16", 10_000)
    found = weights_of(tmp_path / "out")
    table = found.pop("table")
    assert table.dtype == torch.int64 and torch.equal(table, tensors["model.table"])
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert len(files) == 3


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
    with pytest.raises(TrainError, match=r"E-CHECKPOINT-CORRUPT.*checkpoint verify"):
        convert_checkpoint(trained.run.dir, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN", "s3://bucket/new"], "s3://bucket/new is a URL"),
        (["RUN", "new", "--dtype", "bf16"], "add --weights-only"),
        (["RUN", "new", "--file-gb", "1"], "drop --file-gb"),
    ],
)
def test_words_that_would_be_taken_otherwise_are_refused(
    trained: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = [str(trained.run.dir) if word == "RUN" else word for word in words]
    found = CliRunner().invoke(app, ["checkpoint", "convert", *words])
    assert isinstance(found.exception, TrainError) and found.exception.code == "E-CONVERT"
    assert told in str(found.exception)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("convert", [convert_checkpoint, weights_in_one_file])
def test_a_disk_that_refuses_leaves_nothing(
    trained: Config,
    tmp_path: Path,
    fork: Callable[..., Any],
    convert: Callable[..., Any],
    away: bool,
) -> None:
    before = sorted(tmp_path.iterdir())
    source = trained.run.dir.resolve().as_uri() if away else trained.run.dir

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            convert(source, tmp_path / "there" / "deep" / "new")

    assert fork(limited).wait() == (0, "", "")
    assert sorted(tmp_path.iterdir()) == before
