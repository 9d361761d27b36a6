"""Training on CUDA: bitwise resume, and the losses that the CPU computes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_train.config.load import parse_config
from nmoe_train.data import prepare
from nmoe_train.loop import Observer, train
from nmoe_train.parallel.groups import ALONE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 12


class Losses(Observer):
    """Keeps the losses; asks the run to stop at a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.stop_at = stop_at

    def step(self, record: dict[str, Any]) -> None:
        self.losses[record["step"]] = record["loss/train"]
        if record["step"] == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def run(folder: Path, text: Path, device: str, dtype: str, stop_at: int | None = None) -> Losses:
    config = parse_config(
        {
            "run": {"dir": str(folder), "device": device},
            "model": {
                "width": 64,
                "layers": 3,
                "heads": 4,
                "dense_width": 128,
                "moe": {"experts": 8, "top_k": 2, "expert_width": 32},
            },
            "data": {"text": str(text), "tokenizer": "bytes", "dir": str(text.parent / "shards")},
            "train": {"steps": STEPS, "seq_len": 128, "batch_size": 8, "micro_batch_size": 4},
            "precision": {"dtype": dtype},
            "checkpoint": {"every": 5},
        },
        "test",
    )
    observer = Losses(stop_at)
    train(config, prepare(config, lambda state: None), ALONE, observer)
    return observer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some of Python's own sources."""
    library = Path(os.__file__).parent
    file = tmp_path / "text.txt"
    file.write_text("".join((library / name).read_text() for name in ("ast.py", "inspect.py")))
    return file


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_stopped_run_goes_on_bitwise(text: Path, tmp_path: Path, dtype: str) -> None:
    whole = run(tmp_path / "whole", text, "cuda", dtype)
    first = run(tmp_path / "halves", text, "cuda", dtype, stop_at=7)
    second = run(tmp_path / "halves", text, "cuda", dtype)
    assert list(first.losses) == list(range(1, 8))
    assert first.losses | second.losses == whole.losses
    folders = [tmp_path / name / "checkpoints" / "step-00000012" for name in ("whole", "halves")]
    metas = [json.loads((folder / "meta.json").read_text()) for folder in folders]
    assert metas[0]["files"] == metas[1]["files"]


def test_the_losses_are_those_of_the_cpu(text: Path, tmp_path: Path) -> None:
    cuda = run(tmp_path / "cuda", text, "cuda", "fp32").losses
    cpu = run(tmp_path / "cpu", text, "cpu", "fp32").losses
    # fp32 sums in another order, through twelve steps of AdamW.
    assert cuda == pytest.approx(cpu, rel=1e-4)
