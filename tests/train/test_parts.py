"""Small parts: named random numbers, the layout, the device, and what a person sees."""

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nmoe_data.prep import PrepProgress
from nmoe_train.config import Config, ParallelConfig
from nmoe_train.console import ConsoleObserver
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome, pick_device
from nmoe_train.parallel import Layout, current_layout
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


@pytest.mark.parametrize("name", ["dp", "tp", "pp", "ep"])
def test_a_layout_that_is_not_there_yet_is_refused(name: str) -> None:
    with pytest.raises(TrainError, match=f"{name}=2") as caught:
        current_layout(ParallelConfig(**{name: 2}), {})
    assert caught.value.code == "E-LAYOUT"


def test_more_processes_than_the_layout_has_are_refused() -> None:
    with pytest.raises(TrainError, match="2 processes were started") as caught:
        current_layout(ParallelConfig(), {"WORLD_SIZE": "2", "RANK": "1"})
    assert caught.value.code == "E-LAYOUT"
    assert current_layout(ParallelConfig(), {}) == Layout()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["one", "", "-1", "1.0"])
def test_a_rank_that_is_no_number_is_refused_and_named(name: str, value: str) -> None:
    with pytest.raises(TrainError, match=f"{name} is {value!r}") as caught:
        current_layout(ParallelConfig(), {name: value})
    assert caught.value.code == "E-LAYOUT"


def test_a_data_rank_counts_replicas() -> None:
    ranks = [Layout(dp=2, tp=2, pp=1, rank=rank).data_rank for rank in range(4)]
    assert ranks == [0, 0, 1, 1]
    assert Layout(dp=2, tp=3, pp=4, ep=6).ranks == 24


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("auto", "cpu"):
        assert pick_device(name, deterministic=True) == torch.device("cpu")
    with pytest.raises(TrainError) as caught:
        pick_device("cuda", deterministic=True)
    assert caught.value.code == "E-DEVICE"


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
