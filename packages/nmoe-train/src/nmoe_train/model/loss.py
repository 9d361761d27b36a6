"""Cross-entropy from hidden states without ever holding all logits.

Tokens are taken in chunks: each chunk's logits are made, turned into loss and gradient at once, and
dropped, so memory is chunk * V instead of T * V and the output projection runs once. The gradient
of the loss by the logits is (softmax - one_hot) / count, known without waiting for the backward.
Letters: T tokens, H width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        chunk: int,
        needs_gradient: bool,
    ) -> Tensor:
        weight = weight_VH.to(hidden_TH.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        grad_hidden = torch.empty_like(hidden_TH) if needs_gradient else None
        grad_weight = torch.zeros_like(weight_VH) if needs_gradient else None
        for start in range(0, hidden_TH.shape[0], chunk):
            rows = slice(start, start + chunk)
            log_p = torch.log_softmax((hidden_TH[rows] @ weight.T).float(), dim=-1)
            valid = targets_T[rows] != IGNORED
            target = targets_T[rows].clamp(min=0)[:, None]
            loss -= torch.where(valid, log_p.gather(1, target)[:, 0], 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = log_p.exp_().scatter_add_(1, target, -torch.ones_like(target).float())
                grad_logits = (grad_logits * valid[:, None]).to(hidden_TH.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
                grad_weight += grad_logits.T @ hidden_TH[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In fp32, so that both gradients carry the same factor, unrounded.
        scaled = (grad_hidden.float() * grad_loss).to(grad_hidden.dtype)
        return scaled, grad_weight * grad_loss, None, None, None


def chunked_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, chunk: int
) -> Tensor:
    """Sum (not mean) of the cross-entropy over the targets, in nats, fp32 scalar.

    hidden [T, H] in fp32 or bf16, weight [V, H] fp32, targets [T] int64 with `IGNORED` where there
    is nothing to predict. The caller divides by the count over all micro-batches and ranks, so the
    mean is right under any split.
    """
    # Inside the function autograd is off, and a leaf's requires_grad is no word of what is wanted.
    wanted = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_TH, weight_VH, targets_T, chunk, wanted)
    return loss
