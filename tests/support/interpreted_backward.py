"""Looks into the backward of the Triton backend, in Triton's interpreter on the CPU; prints JSON.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. It counts the
tensors of the size of h that live in a backward, and tries what would read h once it has been
overwritten: a second backward, a checkpoint, a second derivative, a compiled backward. It runs
torch's own checks of the custom operators (schema, autograd registration, fake kernels) as well.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from nmoe_kernels.gemm import fused, products
from nmoe_kernels.gemm.plan import plan_rows
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router import triton as router_triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TOKENS, SLOTS, EXPERTS, WIDTH, EXPERT_WIDTH = 40, 2, 3, 64, 24


def main() -> None:
    """Writes what was found."""
    torch.manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS).topk(SLOTS).indices
    inputs = [
        torch.randn(TOKENS, WIDTH).half(),
        torch.rand(TOKENS, SLOTS),
        (torch.randn(EXPERTS, 2 * EXPERT_WIDTH, WIDTH) * WIDTH**-0.5).half(),
        (torch.randn(EXPERTS, WIDTH, EXPERT_WIDTH) * EXPERT_WIDTH**-0.5).half(),
    ]
    for tensor in inputs:
        tensor.requires_grad_()

    def layer(*given: Tensor, recompute: bool = False) -> Tensor:
        return fused.expert_mlp(given[0], ids, *given[1:], recompute=recompute)

    grad = torch.randn(TOKENS, WIDTH).half()
    y, other = layer(*inputs), layer(*inputs, recompute=True)
    first, kept = counted(ids, lambda: gradients(y, inputs, grad, retain_graph=True))
    again, once = counted(ids, lambda: gradients(y, inputs, grad))
    _, recomputed = counted(ids, lambda: gradients(other, inputs, grad))
    replayed = checkpoint(layer, *inputs, use_reentrant=False)
    found = {
        "held": {"kept": once, "recomputed": recomputed, "graph kept": kept},
        "again": apart(again, first),
        "checkpointed": apart(gradients(replayed, inputs, grad), first),
        "twice": second_derivative(layer(*inputs), inputs, grad),
        "checked": checked(ids, inputs),
        "compiled": [compiled(layer, inputs), compiled(routed, router_inputs())],
    }
    sys.stdout.write(json.dumps(found))


def gradients(y: Tensor, inputs: Sequence[Tensor], grad: Tensor, **options: bool) -> list[Tensor]:
    """Of y, for a gradient of it."""
    return list(torch.autograd.grad(y, inputs, grad, **options))


def counted(ids: Tensor, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
    """The work's result, and how many tensors of the size of h live after h got its gradient."""
    shape = (plan_rows(ids, EXPERTS).token_P.shape[0], 2 * EXPERT_WIDTH)
    swiglu_backward, found = products.swiglu_backward, []

    def counting(*arguments: Tensor) -> Tensor:
        result = swiglu_backward(*arguments)
        alive = (one for one in gc.get_objects() if type(one) is Tensor and one.shape == shape)
        found.append(len({tensor.data_ptr() for tensor in alive}))
        return result

    gc.collect()
    with patch.object(products, "swiglu_backward", counting):
        result = work()
    (count,) = found
    return result, count


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The greatest difference."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def second_derivative(y: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> str:
    """What is said to one who asks for it, though the graph is not to be kept."""
    (grad_x, *_) = torch.autograd.grad(y, inputs, grad, create_graph=True, retain_graph=False)
    try:
        grad_x.sum().backward()
    except RuntimeError as refusal:
        return str(refusal)
    return "nothing"


def checked(ids: Tensor, inputs: Sequence[Tensor]) -> dict[str, str]:
    """The worst of torch's checks of each operator.

    Without that of traced autograd, which cannot add up outputs of several types.
    """
    plan = plan_rows(ids, EXPERTS)
    calls = {
        "route": (router_triton._route, (*router_inputs(), None, 2, True, 3, 2, True, 1.5)),
        "expert_mlp": (fused._forward, (*inputs, True, "triton", *plan)),
    }
    answers = {}
    for name, (operator, arguments) in calls.items():
        results = torch.library.opcheck(
            operator, arguments, test_utils=CHECKS, raise_exception=False
        )
        wrong = [str(answer) for answer in results.values() if answer != "SUCCESS"]
        answers[name] = wrong[0] if wrong else "SUCCESS"
    return answers


def router_inputs() -> tuple[Tensor, Tensor]:
    """x [9, 16] and the weight [6, 16]."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 16, generator=generator) for rows in (9, 6))
    return x.requires_grad_(), weight.requires_grad_()


def routed(x: Tensor, weight: Tensor) -> Tensor:
    """Something of weights and logits of a routing."""
    routing = router_triton.route_triton(x, weight, RouterConfig(6, 2, "sigmoid", 3, 2))
    return routing.weights_TK.square().sum(-1) + routing.logits_TE.sin().sum(-1)


def compiled(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """How far output and gradients are from eager mode once autograd is traced whole."""
    both = (function, torch.compile(function, backend="aot_eager", fullgraph=True))
    outputs = [one(*inputs) for one in both]
    grad = torch.linspace(-1, 1, outputs[0].numel(), dtype=outputs[0].dtype).view_as(outputs[0])
    results = [[y.detach(), *gradients(y, inputs, grad)] for y in outputs]
    return apart(*results)


if __name__ == "__main__":
    main()
