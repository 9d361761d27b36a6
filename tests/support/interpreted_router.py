"""Runs the Triton router in Triton's interpreter on the CPU; prints how it differs as JSON.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. It takes
tokens, width, experts and slots, then groups, the groups a token chooses in, the score, and whether
weights are renormalised.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from moe_oracle import relative_error
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router.reference import route_reference
from nmoe_kernels.router.triton import route_triton


def main(
    tokens: int,
    width: int,
    experts: int,
    slots: int,
    groups: int,
    top_groups: int,
    score: str,
    renormalise: bool,
) -> None:
    """Compares a routing and its gradients with the reference in fp64."""
    torch.manual_seed(0)
    config = RouterConfig(experts, slots, score, groups, top_groups, renormalise, scale=2.5)
    # In fp32: the interpreter multiplies the bits of bf16 as if they were integers.
    x = torch.randn(tokens, width)
    weight, bias = torch.randn(experts, width) * width**-0.5, 0.1 * torch.randn(experts)
    bias[experts // 2] = float("nan")
    x[1, 0], x[3, -1] = float("nan"), float("inf")
    upstream = torch.randn(tokens, slots), torch.randn(tokens, experts)

    def gradients(route, x, weight, bias):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        got = route(x, weight, config, bias)
        outputs = got.weights_TK, got.logits_TE
        grads = [grad.to(outputs[0].dtype) for grad in upstream]
        found = []
        for chosen in (slice(None), slice(1), slice(1, None)):
            given = outputs[chosen], (x, weight), grads[chosen]
            found += torch.autograd.grad(*given, retain_graph=True)
        return got, found

    got, got_grads = gradients(route_triton, x.clone(), weight.clone(), bias)
    want, want_grads = gradients(route_reference, x.double(), weight.double(), bias.double())
    errors = {
        name: relative_error(getattr(got, name), getattr(want, name))
        for name in ("weights_TK", "logits_TE", "scores_TE")
    }
    errors |= {
        f"grad {number}": relative_error(one, other)
        for number, (one, other) in enumerate(zip(got_grads, want_grads, strict=True))
    }
    same = {
        name: torch.equal(getattr(got, name), getattr(want, name))
        for name in ("ids_TK", "load_E", "invalid", "valid_T")
    }
    sys.stdout.write(json.dumps({"errors": errors, "same": same}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:7]), sys.argv[7], sys.argv[8] == "True")
