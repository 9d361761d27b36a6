"""Validation loss: mean cross-entropy over held-out tokens, each predicted once, in order."""

import torch
from nmoe_data.loader import Loader

from nmoe_train.data import to_step
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.parallel.fsdp import free_gathered
from nmoe_train.parallel.groups import ALONE, Groups


@torch.no_grad()
def validation_loss(
    model: Transformer,
    loader: Loader,
    *,
    sequences: int,
    batch_size: int,
    chunk: int,
    groups: Groups = ALONE,
) -> float:
    """Nats per token over the first `sequences` windows of the held-out stream.

    Ranks take batches in turn and all get the same loss. Raises TrainError `E-DATA-HELD-OUT` when
    there is nothing to predict.
    """
    device = model.device
    total, predictions = torch.zeros((), device=device), 0
    last = min(sequences, loader.windows)
    layout = groups.layout
    for start in range(0, last, batch_size * layout.dp):
        first = start + batch_size * layout.data_rank
        counts = first < last
        # A rank that has no batch left still holds experts that others need: it takes any.
        first = first if counts else start
        step = to_step(loader.sequential(first, min(batch_size, last - first)))
        output = model.hidden(step.inputs_BS.to(device), step.documents_BS.to(device))
        loss = model.loss(output.hidden_BSH, step.targets_BS.to(device), chunk)
        if counts:
            total += loss
            predictions += step.predictions if layout.speaks_for_share else 0
    free_gathered(model)
    groups.sum_(total)
    (predictions,) = groups.counts(predictions)
    if predictions == 0:
        raise TrainError(
            "E-DATA-HELD-OUT",
            f"the {last} held-out sequences hold nothing to predict: every document is one token",
            "hold out longer documents",
        )
    return total.item() / predictions
