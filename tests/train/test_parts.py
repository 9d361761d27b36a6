"""Small parts: named random numbers, the device, and what a person sees."""

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nmoe_data.prep import PrepProgress
from nmoe_train.config import Config
from nmoe_train.console import ConsoleObserver
from nmoe_train.device import pick_device
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome
from nmoe_train.randomness import generator, random_key
from rich.console import Console


def test_random_numbers_follow_from_seed_and_purpose_alone() -> None:
    torch.manual_seed(1)
    first = torch.rand(4, generator=generator(3, "init", "layers.0", 5))
    torch.manual_seed(2)
    torch.rand(100)
    assert torch.equal(torch.rand(4, generator=generator(3, "init", "layers.0", 5)), first)
    keys = {
        random_key(seed, *purpose)
        for seed in range(20)
        for purpose in [("init",), ("init", 1), ("init", 2), ("data", 1), ("init", "1", 1)]
    }
    assert len(keys) == 100
    assert all(0 <= key < 1 << 63 for key in keys)


def test_keys_do_not_change_between_versions() -> None:
    # A checkpoint of today resumed tomorrow must draw the same numbers.
    assert random_key(0, "init", "embedding.weight") == 0x119D979F73EC3066


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("auto", "cpu"):
        assert pick_device(name, deterministic=True) == torch.device("cpu")
    with pytest.raises(TrainError) as caught:
        pick_device("cuda", deterministic=True)
    assert caught.value.code == "E-DEVICE"


def test_each_process_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    device = pick_device("auto", deterministic=False, local_rank=3, local_ranks=4)
    assert (device, taken) == (torch.device("cuda", 3), [3])
    for rank in (0, 4):
        with pytest.raises(TrainError, match="5 processes were started on a host with 4") as caught:
            pick_device("cuda", deterministic=False, local_rank=rank, local_ranks=5)
        assert caught.value.code == "E-DEVICE", "the same decision on every rank"
    on_cpu = pick_device("cpu", deterministic=True, local_rank=4, local_ranks=5)
    assert on_cpu == torch.device("cpu")


@pytest.mark.parametrize("wanted", [True, False])
def test_cuda_repeats_itself_where_the_run_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Config], wanted: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    run = tiny(**({} if wanted else {"run.deterministic": False})).run
    try:
        assert pick_device("auto", deterministic=run.deterministic) == torch.device("cuda")
        assert torch.are_deterministic_algorithms_enabled() == wanted
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == wanted
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    tiny: Callable[..., Config], run: Callable[..., Outcome]
) -> None:
    with pytest.raises(TrainError, match=r"model\.vocab_size: 256 rows for a tokenizer of 257 ids"):
        run(tiny(**{"model.vocab_size": 256}))
    larger = run(tiny(**{"model.vocab_size": 264, "train.steps": 1}))
    assert larger.model.output_weight.shape[0] == 264


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss/ce": 2.5, "tokens_per_s": 1234.0, "step_ms": 500.0}


def test_without_a_terminal_the_last_step_and_the_end_of_the_data_are_lines() -> None:
    out = io.StringIO()
    with ConsoleObserver(Console(file=out, width=40)) as observer:
        observer.preparation(PrepProgress(50, 100, 1, 2000, 0))
        observer.preparation(PrepProgress(100, 100, 2, 4000, 0))
        observer.begin(0, 3)
        for step in (1, 2, 3):
            observer.step(record(step))
        observer.message("[bold] a path/that/is/longer/than/the/console/is/wide")
    lines = out.getvalue().splitlines()
    assert lines == [
        "token shards 100%  4,000 tokens",
        "step 3/3  loss 2.500  1,234 tokens/s  0 s left",
        "[bold] a path/that/is/longer/than/the/console/is/wide",
    ]


def test_with_a_terminal_there_is_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with ConsoleObserver(console) as observer:
        observer.begin(1, 3)
        observer.step(record(2))
    text = out.getvalue()
    assert "training" in text
    assert "67%" in text
    assert "loss 2.500" in text
