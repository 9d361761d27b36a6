"""Figures that say how good a model must be to have learned anything."""

import numpy as np

from nmoe_data.errors import DataError
from nmoe_data.loader import TokenDataset


def unigram_loss(train: TokenDataset, held_out: TokenDataset) -> float:
    """Returns the loss (nats per token) of guessing held-out tokens by their frequency in train.

    p(t) = (count_train(t) + 1) / (N_train + V), V = vocabulary size. Every token counts,
    end-of-document tokens too, and also those at the start of a document.

    Raises DataError: E-TOKENIZER-DRIFT if the two were made with different tokenizers,
    E-DATA-TOO-SMALL if the held-out set is empty.
    """
    if train.manifest.tokenizer["hash"] != held_out.manifest.tokenizer["hash"]:
        raise DataError(
            "E-TOKENIZER-DRIFT",
            f"{train.path} and {held_out.path} were made with different tokenizers",
            "prepare both with one tokenizer",
        )
    if held_out.tokens == 0:
        raise DataError(
            "E-DATA-TOO-SMALL", f"{held_out.path} holds no tokens", "hold out a larger share"
        )
    smoothed = _counts(train) + 1.0
    log_probability = np.log(smoothed) - np.log(smoothed.sum())
    return float(-(_counts(held_out) * log_probability).sum() / held_out.tokens)


def _counts(dataset: TokenDataset) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    total = np.zeros(dataset.vocab_size, np.float64)
    for chunk in dataset.chunks():
        total += np.bincount(chunk, minlength=dataset.vocab_size)
    return total
