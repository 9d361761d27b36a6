"""Validation loss against a plain computation, and the text that a model continues."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nmoe_data.loader import Loader
from nmoe_data.tokenizer import Tokenizer
from nmoe_train.config import Config
from nmoe_train.data import TrainingData
from nmoe_train.errors import TrainError
from nmoe_train.eval import generate, validation_loss
from nmoe_train.model import Transformer
from nmoe_train.parallel.groups import ALONE
from nmoe_train.run import GENERATED_TOKENS, PROMPT_TOKENS, most_tokens

Tiny = Callable[..., Config]
Build = Callable[..., Transformer]
LENGTH = 16


def plain_loss(model: Transformer, data: TrainingData, windows: int) -> float:
    """Mean cross-entropy over the first windows, read from the stream token by token."""
    end = data.tokenizer.end_of_document_id
    total, count = 0.0, 0
    for window in range(windows):
        ids = data.held_out.read(window * LENGTH, LENGTH + 1)
        documents = np.cumsum([0, *(ids[:-1] == end)])
        with torch.no_grad():
            logits = model.logits(
                torch.from_numpy(ids[None, :-1]), torch.from_numpy(documents[None, :-1])
            )[0].double()
        log_p = torch.log_softmax(logits, -1)
        for place in range(LENGTH):
            if ids[place] != end:
                total -= float(log_p[place, ids[place + 1]])
                count += 1
    return total / count


@pytest.mark.parametrize(
    ("sequences", "batch_size"), [(1, 1), (10, 3), (10, 10), (10, 64), (100_000, 50)]
)
def test_validation_is_the_mean_over_each_window_once(
    tiny: Tiny, build: Build, data: TrainingData, sequences: int, batch_size: int
) -> None:
    model = build(tiny(**{"model.init_std": 0.2}))
    loader = Loader(data.held_out, seq_len=LENGTH, seed=7)
    assert loader.windows == (data.held_out.tokens - 1) // LENGTH
    got = validation_loss(model, loader, sequences=sequences, batch_size=batch_size, chunk=11)
    windows = min(sequences, loader.windows)
    assert got == pytest.approx(plain_loss(model, data, windows), rel=1e-5)


def test_validation_leaves_no_trace(tiny: Tiny, build: Build, data: TrainingData) -> None:
    model = build(tiny())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = Loader(data.held_out, seq_len=LENGTH, seed=7)
    losses = {validation_loss(model, loader, sequences=8, batch_size=4, chunk=16) for _ in range(2)}
    assert len(losses) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_documents_of_one_token_leave_nothing_to_predict(
    tiny: Tiny, build: Build, data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(data.held_out, seq_len=LENGTH, seed=7)
    end = data.tokenizer.end_of_document_id
    monkeypatch.setattr(data.held_out, "read", lambda start, count, out: out.fill(end))
    with pytest.raises(TrainError) as caught:
        validation_loss(build(tiny()), loader, sequences=3, batch_size=2, chunk=11)
    assert caught.value.code == "E-DATA-HELD-OUT"
    assert "the 3 held-out sequences" in str(caught.value)


@pytest.fixture
def writer(tiny: Tiny, build: Build) -> Transformer:
    """A model whose next token depends strongly on what came before, and that hardly ends."""
    model = build(tiny(**{"model.init_std": 0.5, "model.positions": 24}))
    assert model.head is not None
    model.head.weight.data[256] = 0.0
    return model


@pytest.fixture
def tokenizer(data: TrainingData) -> Tokenizer:
    return data.tokenizer


def greedy(model: Transformer, ids: list[int], tokens: int, end: int) -> list[int]:
    start = len(ids)
    while len(ids) < start + tokens:
        window = torch.tensor([ids[-24:]])
        with torch.no_grad():
            chosen = int(model.logits(window, torch.zeros_like(window))[0, -1].argmax())
        if chosen == end:
            break
        ids = [*ids, chosen]
    return ids[start:]


def test_greedy_takes_the_likeliest_token_every_time(
    writer: Transformer, tokenizer: Tokenizer
) -> None:
    texts = {
        generate(writer, tokenizer, "a token", tokens=40, temperature=0.0, seed=s) for s in (0, 1)
    }
    end = tokenizer.end_of_document_id
    wanted = greedy(writer, tokenizer.encode("a token"), 40, end)
    assert len(wanted) == 40, "more than the model's positions"
    assert texts == {tokenizer.decode(wanted)}


def test_the_same_seed_writes_the_same_text_and_another_seed_another(
    writer: Transformer, tokenizer: Tokenizer
) -> None:
    def text(**options: Any) -> str:
        return generate(writer, tokenizer, "a token", tokens=20, **options)

    torch.manual_seed(1)
    first = text(seed=3)
    torch.manual_seed(2)
    assert text(seed=3) == first
    assert len({text(seed=seed) for seed in range(8)}) == 8
    assert text(seed=3, temperature=1e-4) == text(temperature=0.0)


def test_a_prompt_cut_inside_a_character_fits_the_exchange_between_ranks(
    tiny: Tiny, tokenizer: Tokenizer
) -> None:
    texts = ["a" * letters + "é日𝄞" * PROMPT_TOKENS for letters in range(PROMPT_TOKENS)]
    prompts = [tokenizer.decode(tokenizer.encode(text)[:PROMPT_TOKENS]) for text in texts]
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert longest > PROMPT_TOKENS
    config = tiny(**{"train.micro_batch_size": 1, "model.positions": 512})
    assert most_tokens(config, ALONE) >= longest + GENERATED_TOKENS


def test_it_stops_at_the_end_of_the_document(
    tiny: Tiny, build: Build, tokenizer: Tokenizer
) -> None:
    model = build(tiny())
    assert model.head is not None
    end = tokenizer.end_of_document_id
    # Row `end` of the output projection looks where every state points.
    hidden = model.hidden(*(torch.tensor([tokenizer.encode("ab")]),) * 2).hidden_BSH[0, -1]
    model.head.weight.data[end] = hidden.detach() * 10
    assert generate(model, tokenizer, "ab", tokens=20, temperature=0.0) == ""
    model.head.weight.data[end] = -hidden.detach() * 10
    assert generate(model, tokenizer, "ab", tokens=1, temperature=0.0) != ""


def test_an_empty_prompt_starts_a_document(writer: Transformer, tokenizer: Tokenizer) -> None:
    end = tokenizer.end_of_document_id
    text = generate(writer, tokenizer, "", tokens=10, temperature=0.0)
    assert text == tokenizer.decode(greedy(writer, [end], 10, end))


def test_no_more_tokens_are_written_than_asked_for(
    writer: Transformer, tokenizer: Tokenizer
) -> None:
    assert generate(writer, tokenizer, "a token", tokens=0) == ""
    assert len(generate(writer, tokenizer, "a token", tokens=3, temperature=0.0)) <= 3
