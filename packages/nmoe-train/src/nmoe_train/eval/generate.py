"""Text that a model continues, by sampling one token after another."""

import torch
from nmoe_data.tokenizer import Tokenizer

from nmoe_train.model import Transformer
from nmoe_train.parallel.fsdp import free_gathered
from nmoe_train.parallel.groups import ALONE, Groups
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
) -> str:
    """Continues `prompt` by at most `tokens` tokens; stops at the end of the document.

    Temperature 0 takes the likeliest token. The window is the model's `positions`. All ranks
    continue the same text, by the token that rank 0 draws, as their experts work for each other.
    """
    device = model.device
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document_id]
    randomness = generator(seed, "generate")
    start = len(ids)
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.positions :]], device=device)
        logits = model.logits(window, torch.zeros_like(window))[0, -1].cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            chosen = int(torch.multinomial(probabilities, 1, generator=randomness))
        (chosen,) = groups.counts(chosen if groups.first else 0)
        if chosen == tokenizer.end_of_document_id:
            break
        ids.append(chosen)
    free_gathered(model)
    return tokenizer.decode(ids[start:])
