"""Cross-entropy from hidden states without ever holding all logits.

Tokens are taken in chunks: each chunk's logits are made, turned into loss and gradient at once, and
dropped, so memory is chunk * V instead of T * V and the output projection runs once. The gradient
of the loss by the logits is (softmax - one_hot) / count, known without waiting for the backward.
Ranks that share the vocabulary each make the logits of their columns, and tell one another two
numbers a token: the logsumexp of theirs and, where the target is one of them, its logit.
Letters: T tokens, H width, V vocabulary, v of it here.
"""

from typing import Any

import torch
from torch import Tensor

from nmoe_train.model.tensor import WHOLE, TensorParallel

IGNORED = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_vH: Tensor,
        targets_T: Tensor,
        chunk: int,
        needs_gradient: bool,
        tensor: TensorParallel,
        first: int,
    ) -> Tensor:
        weight = weight_vH.to(hidden_TH.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        grad_hidden = torch.empty_like(hidden_TH) if needs_gradient else None
        grad_weight = torch.zeros_like(weight_vH, dtype=torch.float32) if needs_gradient else None
        for start in range(0, hidden_TH.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (hidden_TH[rows] @ weight.T).float()
            valid = targets_T[rows] != IGNORED
            column = targets_T[rows] - first
            here = (column >= 0) & (column < weight.shape[0])
            column = column.clamp(0, weight.shape[0] - 1)[:, None]
            log_p, of_target = _log_probabilities(logits, column, here, tensor)
            loss -= torch.where(valid, of_target, 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = log_p.exp_().scatter_add_(1, column, -here.float()[:, None])
                grad_logits = (grad_logits * valid[:, None]).to(hidden_TH.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
                grad_weight += grad_logits.T @ hidden_TH[rows]
        ctx.weight_dtype = weight_vH.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        # All ranks know the same sum; one of them counts it.
        return loss if tensor.rank == 0 else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In fp32, so that both gradients carry the same factor, unrounded.
        scaled = (grad_hidden.float() * grad_loss).to(grad_hidden.dtype)
        return scaled, (grad_weight * grad_loss).to(ctx.weight_dtype), None, None, None, None, None


def _log_probabilities(
    logits_Tv: Tensor, column_T1: Tensor, here_T: Tensor, tensor: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Logarithms of the softmax over all of V: of the columns here [T, v], of the target [T].

    `column`: the target's place among the columns here, where it is `here`.
    """
    if tensor.alone:
        log_p_TV = torch.log_softmax(logits_Tv, dim=-1)
        return log_p_TV, log_p_TV.gather(1, column_T1)[:, 0]
    picked_T = torch.where(here_T, logits_Tv.gather(1, column_T1)[:, 0], 0.0)
    told_2T = torch.stack((logits_Tv.logsumexp(-1), picked_T))
    told_R2T = tensor.collect(told_2T[None], 0, tensor.ranks)
    total_T = told_R2T[:, 0].logsumexp(0)
    return logits_Tv - total_T[:, None], told_R2T[:, 1].sum(0) - total_T


def chunked_cross_entropy(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    targets_T: Tensor,
    *,
    chunk: int,
    tensor: TensorParallel = WHOLE,
    first: int = 0,
) -> Tensor:
    """Sum (not mean) of the cross-entropy over the targets, in nats, fp32 scalar.

    hidden [T, H] in fp32 or bf16, weight [v, H] fp32, targets [T] int64 with `IGNORED` where there
    is nothing to predict. The caller divides by the count over all micro-batches and ranks, so the
    mean is right under any split.

    Ranks of a `tensor` that share the vocabulary bring the same tokens, and their rows of the
    weight from row `first` of V on. One of them returns the sum and the others 0, so that sums over
    ranks are right; all must run the backward with the same factor, and the gradient of hidden is
    each one's part of a sum over them.
    """
    # Inside the function autograd is off, and a leaf's requires_grad is no word of what is wanted.
    wanted = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_vH.requires_grad)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden_TH, weight_vH, targets_T, chunk, wanted, tensor, first
    )
    return loss
