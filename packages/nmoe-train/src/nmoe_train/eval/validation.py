"""Validation loss: mean cross-entropy over held-out tokens, each predicted once, in order."""

import torch
from nmoe_data.loader import Loader
from torch import Tensor

from nmoe_train.data import Step, to_step
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.model.loss import IGNORED
from nmoe_train.parallel.fsdp import free_gathered
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.pipeline import Pipeline


@torch.no_grad()
def validation_loss(
    model: Transformer,
    loader: Loader,
    *,
    sequences: int,
    batch_size: int,
    chunk: int,
    groups: Groups = ALONE,
    pipeline: Pipeline | None = None,
) -> float:
    """Nats per token over the first `sequences` windows of the held-out stream.

    `pipeline`: the stage that the model is part of; None where it is all of it. Ranks take batches
    in turn and all get the same loss. Raises TrainError `E-DATA-HELD-OUT` when there is nothing to
    predict.
    """
    device = model.device
    total, predictions = torch.zeros((), device=device), 0
    last = min(sequences, loader.windows)
    layout = groups.layout
    batches: list[Step] = []
    for start in range(0, last, batch_size * layout.dp):
        first = start + batch_size * layout.data_rank
        # A rank that has no batch left still holds experts that others need: it takes any.
        first, predicts = (first, True) if first < last else (start, False)
        step = to_step(loader.sequential(first, min(batch_size, last - first)))
        targets = step.targets_BS if predicts else torch.full_like(step.targets_BS, IGNORED)
        inputs, documents = step.inputs_BS.to(device), step.documents_BS.to(device)
        batches.append(Step(inputs, documents, targets.to(device), step.predictions))
        predictions += step.predictions if predicts and layout.speaks_for_share else 0

    def add(hidden_BSH: Tensor, batch: Step) -> None:
        total.add_(model.loss(hidden_BSH, batch.targets_BS, chunk))

    (pipeline or Pipeline(model)).evaluate(batches, add)
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
