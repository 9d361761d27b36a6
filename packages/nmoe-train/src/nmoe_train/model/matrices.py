"""Which matrices lie in the hidden weights: every linear map from vectors to vectors, once.

A weight may hold several: the experts of a stack, the gate and the up projection of each, the heads
of attention, a latent beside a rotary key. Each is a map of its own, so what treats weights as
matrices (Muon) must take them one by one; as attention's are those of single heads, ranks that
share the heads have them whole. Embedding, output projection, norms and router are not hidden: the
rows of the first and the last and of the router stand for tokens and experts, not for directions.

Letters: E experts, I expert width, H width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from nmoe_train.model.box import Box, held_box
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.layers import Linear
from nmoe_train.model.tensor import local
from nmoe_train.model.transformer import Transformer


@dataclass(frozen=True)
class HiddenWeight:
    """A weight's matrices, and which part of it is here."""

    here: Box
    """Of the whole weight, [out, in], or of a stack of experts, [E, 2, I, H] or [E, H, I]."""
    matrices: list[Box]
    """Of the whole weight, those of which something may be here; all dimensions but the last two
    are 1."""

    def of(self, tensor: Tensor) -> Tensor:
        """What is here of a tensor like the weight, in the shape of `here`; it shares its memory.

        tensor: the weight, its gradient or a moment.
        """
        return local(tensor).view(self.here.shape)


def hidden_weights(model: Transformer) -> dict[str, HiddenWeight]:
    """The hidden weights by the names of their parameters."""
    found = dict(_linear_maps(model))
    for name, parameter in model.named_parameters():
        if STACKED_EXPERTS.search(name):
            found[name] = _stacked_experts(model, stack_box(model, name, parameter))
    return found


def _linear_maps(model: Transformer) -> Iterator[tuple[str, HiddenWeight]]:
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or module is model.head:
            continue
        here = held_box(module.weight, module.cut)
        boxes = [Box((0, 0), here.whole, here.whole)]
        if module.stack is not None:
            dim = module.stack.dim
            boxes = [
                _span(here.whole, dim, start, stop)
                for start, stop in pairwise(accumulate(module.stack.lengths, initial=0))
            ]
        yield f"{name}.weight", HiddenWeight(here, boxes)


def _span(whole: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    """All of a tensor but what is outside a range of one dimension."""
    first, shape = [0] * len(whole), list(whole)
    first[dim], shape[dim] = start, stop - start
    return Box(tuple(first), tuple(shape), whole)


def stack_box(model: Transformer, name: str, parameter: Tensor) -> Box:
    """What is here of a stack of all experts: of gate and up apart, [E, 2, I, H], or [E, H, I]."""
    stack = held_box(parameter, None)
    start, shape, whole = list(stack.start), list(stack.shape), list(stack.whole)
    start[0] += model.local_experts.start
    whole[0] = model.config.moe.experts
    if name.endswith("gate_up"):
        for sizes in (shape, whole):
            sizes[1:2] = [2, sizes[1] // 2]
        start[1:2] = [0, start[1]]
    if model.expert_cut is not None:
        start[2] = model.expert_cut.start
        whole[2] = model.expert_cut.whole
    return Box(tuple(start), tuple(shape), tuple(whole))


def _stacked_experts(model: Transformer, here: Box) -> HiddenWeight:
    *stacks, rows, columns = here.whole
    ones = (1,) * len(stacks)
    matrices = [
        Box((expert, *place, 0, 0), (*ones, rows, columns), here.whole)
        for expert in model.local_experts
        for place in ([(0,), (1,)] if len(stacks) == 2 else [()])
    ]
    return HiddenWeight(here, matrices)
