"""Muon (Jordan et al. 2024): every hidden matrix moves by its momentum, made orthogonal.

The momentum is Nesterov's, as in torch.optim.Muon. Its singular values are drawn towards one by
Newton-Schulz steps with the coefficients of that work, in bf16 on a GPU, where the products are
most of the cost and their rounding does not hurt, and in fp32 elsewhere. The update is scaled to
the size of AdamW's, 0.2 * sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982, section 2.2), so
that one rate serves both. torch.optim.Muon takes a single two-dimensional weight that is here
whole; weights here are stacks of matrices and parts of them (`model.matrices`), so that a function
that brings whole matrices together is passed in.

The router keeps AdamW, like embedding and output projection: its rows are the scores of experts
that compete, and an orthogonal update would move the row of an expert that was hardly chosen as far
as that of one chosen by all.

Letters: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nmoe_train.model import Transformer
from nmoe_train.model.matrices import HiddenWeight, hidden_weights
from nmoe_train.model.tensor import local
from nmoe_train.optim.adamw import GuardedAdamW

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_OF_ADAMW = 0.2
STACK_NUMBERS = 1 << 26
"""Numbers of matrices that are made orthogonal at once: enough to fill a GPU."""

OnStack = Callable[[Tensor], Tensor]
"""A function of whole matrices [N, R, C], each by itself."""
OnMatrices = Callable[[Mapping[str, Tensor], OnStack], None]
"""Applies a function to all matrices that parts lie in, by the names of their weights, in place."""


class Muon(GuardedAdamW):
    """Muon in the groups that have a `momentum`, torch's fused AdamW in the others.

    A step uses up the gradients of hidden weights: their memory holds the update, and `grad` is
    None after it. Where `found_inf` is 1 nothing changes, and no host read decides it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        hidden: Mapping[str, nn.Parameter],
        on_matrices: OnMatrices,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._names = {parameter: name for name, parameter in hidden.items()}
        self._on_matrices = on_matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is needed
        """Updates all weights that have a gradient."""
        groups = [group for group in self.param_groups if "momentum" in group]
        updates = {
            self._names[parameter]: self._update(parameter, group["momentum"])
            for group in groups
            for parameter in group["params"]
        }
        self._on_matrices(updates, adamw_sized)
        for group in groups:
            for parameter in group["params"]:
                self._move(parameter, updates[self._names[parameter]], group)
        super().step(closure)

    def _update(self, parameter: Tensor, momentum: float) -> Tensor:
        """Adds the gradient to the momentum; Nesterov's update, in the gradient's memory."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        update, mean = local(parameter.grad), local(state["momentum_buffer"])
        if self.found_inf is not None:
            # Moving the mean towards itself leaves its bits as they were.
            torch.where(self.found_inf.bool(), mean, update, out=update)
        mean.lerp_(update, 1 - momentum)
        return update.lerp_(mean, momentum)

    def _move(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        rate: float | Tensor = group["lr"]
        if self.found_inf is not None:
            rate = group["lr"] * (1 - self.found_inf)
        weight = local(parameter)
        weight.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))
        parameter.grad = None


def adamw_sized(stack_NRC: Tensor) -> Tensor:
    """Orthogonal matrices of the size of AdamW's updates: a root mean square of about 0.2."""
    return orthogonalise(stack_NRC).mul_(RMS_OF_ADAMW * math.sqrt(max(stack_NRC.shape[1:])))


def orthogonalise(stack_NRC: Tensor) -> Tensor:
    """Each matrix of fp32 [N, R, C] with all its singular values near one, by Newton-Schulz.

    Zero stays zero. A singular value below 1e-3 of the root of their squares' sum stays below one.
    """
    a, b, c = COEFFICIENTS
    x = stack_NRC / torch.linalg.matrix_norm(stack_NRC, keepdim=True).clamp_min(1e-12)
    if x.is_cuda:
        x = x.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(stack_NRC.dtype)


def working_bytes(shape: tuple[int, int], matrices: int, *, cuda: bool) -> int:
    """Most bytes that `replace` takes beside so many matrices of one shape, for `adamw_sized`.

    In fp32: the stack, its normed copy, the next iterate and two products of rows with rows. In
    bf16, where these are smaller: the result in fp32 beside the stack and the last iterate.
    """
    numbers = math.prod(shape)
    taken = min(matrices, max(1, STACK_NUMBERS // numbers))
    return taken * (10 * numbers if cuda else 12 * numbers + 8 * min(shape) ** 2)


def matrices_here(model: Transformer) -> OnMatrices:
    """For a model whose matrices are here whole."""
    weights = hidden_weights(model)

    def apply(parts: Mapping[str, Tensor], function: OnStack) -> None:
        replace(whole_matrices(weights, parts), function)

    return apply


def whole_matrices(
    weights: Mapping[str, HiddenWeight], parts: Mapping[str, Tensor]
) -> Iterable[Tensor]:
    """All matrices [R, C] that lie in parts; they share their memory."""
    for name, part in parts.items():
        weight = weights[name]
        for box in weight.matrices:
            yield box.within(weight.here).of(weight.of(part)).flatten(0, -2)


def replace(matrices: Iterable[Tensor], function: OnStack) -> None:
    """Puts in place of each matrix what the function makes of it, many of one shape at once."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    for shape, alike in by_shape.items():
        count = max(1, STACK_NUMBERS // shape.numel())
        for first in range(0, len(alike), count):
            some = alike[first : first + count]
            torch._foreach_copy_(some, list(function(torch.stack(some)).unbind()))
