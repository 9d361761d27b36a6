"""From any layout to any other: every tensor, moment and the loader's position are the same."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nmoe_train.checkpoint.folder as folders
import pytest
import torch
from layout_runs import saved as read_files
from nmoe_data.loader import Loader
from nmoe_train.checkpoint import (
    materialise_moments,
    newest_sound_checkpoint,
    state_boxes,
)
from nmoe_train.config import Config
from nmoe_train.data import TrainingData
from nmoe_train.parallel import Layout
from reshard import Part, move, part
from torch import Tensor

STEP = 7
BATCH = 24
LAYOUTS = {
    "1": Layout(),
    "dp2xep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "8": Layout(dp=2, tp=2, pp=2, ep=4),
    "6": Layout(dp=3, tp=2, ep=2),
    "4": Layout(dp=2, pp=2, ep=2),
    "8 others": Layout(dp=8, ep=8),
}
CHAINS = [
    ["dp2xep2", "ep4", "dp2xep2"],
    ["tp2", "pp2", "tp2"],
    ["8", "6", "4", "1", "8 others", "1", "4", "6", "8"],
]
Tiny = Callable[..., Config]


def config_of(tiny: Tiny, *, fsdp: bool) -> Config:
    return tiny(
        **{
            "model.layers": 3,
            "model.moe.experts": 8,
            "train.batch_size": BATCH,
            "parallel.fsdp": fsdp,
        }
    )


def whole_state(config: Config) -> dict[str, Tensor]:
    """A state in which every number is another one."""
    with part(config, Layout()) as here:
        materialise_moments(here.model, here.optimizer, STEP)
        state = here.state()
        draw = torch.Generator().manual_seed(0)
        return {
            name: torch.rand(tensor.shape, generator=draw) + 1e-3 for name, tensor in state.items()
        }


def sha256(tensor: Tensor) -> str:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


class Reads:
    """Counts the bytes of tensors that are read from checkpoint files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 0
        real, reads = folders.safe_open, self

        class Slice:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def __getitem__(self, places: Any) -> Tensor:
                tensor: Tensor = self._inner[places]
                reads.total += tensor.nbytes
                return tensor

        class File:
            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._inner = real(*arguments, **named)

            def get_slice(self, name: str) -> Slice:
                return Slice(self._inner.get_slice(name))

        monkeypatch.setattr(folders, "safe_open", File)


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: " -> ".join(chain))
def test_every_tensor_and_moment_is_the_same_on_every_layout(
    tiny: Tiny,
    data: TrainingData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chain: list[str],
    fsdp: bool,
) -> None:
    config = config_of(tiny, fsdp=fsdp)
    want = whole_state(config)
    reads = Reads(monkeypatch)
    held: list[int] = []

    def look(here: Part) -> None:
        boxes, state = state_boxes(here.model), here.state()
        for name, tensor in state.items():
            box = boxes.get(name)
            expected = want[name] if box is None else box.of(want[name])
            assert sha256(tensor) == sha256(expected), (here.layout, name)
        held.append(sum(tensor.nbytes for tensor in state.values()))
        assert here.layout.ranks == 1 or held[-1] < sum(t.nbytes for t in want.values())

    saved: Any = want
    meta = {"loader": {"step": STEP, "seed": 3}, "tokens": 1, "fields": {}}
    for number, name in enumerate(chain):
        run = tmp_path / str(number)
        root = run / "checkpoints"
        reads.total = 0
        held.clear()
        move(config, LAYOUTS[name], saved, root, STEP, meta, look)
        if saved is not want:
            assert reads.total == sum(held), "a rank reads what it holds, and no more"
        files = read_files(run, STEP)
        assert {n: sha256(t) for n, t in files.items()} == {n: sha256(t) for n, t in want.items()}
        checkpoint, problems = newest_sound_checkpoint(root)
        assert checkpoint is not None and problems == []
        assert checkpoint.meta["loader"] == meta["loader"]
        assert_same_batches(data, LAYOUTS[name], checkpoint.meta["loader"])
        saved = checkpoint.tensors()


def assert_same_batches(data: TrainingData, layout: Layout, position: dict[str, int]) -> None:
    """The shares of a layout's ranks are together the batch that one process would take next."""
    loader = Loader(data.train, seq_len=16, seed=position["seed"])
    whole = loader.batch(position["step"], BATCH)
    shares = [loader.batch(position["step"], BATCH, share, layout.dp) for share in range(layout.dp)]
    together = torch.cat([torch.as_tensor(share.tokens) for share in shares])
    assert torch.equal(together, torch.as_tensor(whole.tokens))
