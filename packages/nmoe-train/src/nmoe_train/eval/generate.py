"""Text that a model continues, by sampling one token after another."""

import torch
from nmoe_data.tokenizer import Tokenizer
from torch import Tensor

from nmoe_train.data import Step
from nmoe_train.model import Transformer
from nmoe_train.parallel.fsdp import free_gathered
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.pipeline import Pipeline
from nmoe_train.randomness import generator


@torch.no_grad()
def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    groups: Groups = ALONE,
    pipeline: Pipeline | None = None,
) -> str:
    """Continues `prompt` by at most `tokens` tokens; stops at the end of the document.

    Temperature 0 takes the likeliest token. The window is the model's `positions`. `pipeline`: the
    stage that the model is part of; None where it is all of it. All ranks continue the same text,
    by the token that the first of the last stage draws, as they work for each other.
    """
    device = model.device
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document_id]
    randomness = generator(seed, "generate")
    start, stage = len(ids), pipeline or Pipeline(model)
    draws = groups.layout.rank == groups.layout.first_with_output
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.positions :]], device=device)
        logits = _last_logits(stage, window)
        chosen = 0
        if draws and temperature == 0:
            chosen = int(logits[0].argmax())
        elif draws:
            probabilities = torch.softmax(logits[0] / temperature, dim=-1)
            chosen = int(torch.multinomial(probabilities, 1, generator=randomness))
        (chosen,) = groups.counts(chosen)
        if chosen == tokenizer.end_of_document_id:
            break
        ids.append(chosen)
    free_gathered(model)
    return tokenizer.decode(ids[start:])


def _last_logits(stage: Pipeline, window_1S: Tensor) -> list[Tensor]:
    """Logits [V] after a text, on the CPU; none on stages without the output."""
    found: list[Tensor] = []

    def use(hidden_BsH: Tensor, _: Step) -> None:
        logits_BSV = stage.model.all_logits(hidden_BsH, window_1S.shape[1])
        found.append(logits_BSV[0, -1].cpu())

    nothing = torch.zeros_like(window_1S)
    stage.evaluate([Step(window_1S, nothing, nothing, 0)], use)
    return found
