"""Runs the Triton backend in Triton's interpreter on the CPU; prints its relative errors as JSON.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. It takes
tokens, width, expert width, experts, slots, and whether some slots are dropped.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from moe_oracle import expert, relative_error
from nmoe_kernels.gemm.fused import expert_mlp


def main(tokens: int, width: int, expert_width: int, experts: int, slots: int, drop: int) -> None:
    """Compares output and gradients with a loop over tokens in fp64."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).topk(slots, dim=-1).indices
    if drop:
        ids[::3, 0] = experts
    x, grad = torch.randn(tokens, width).half(), torch.randn(tokens, width).half()
    gate_up = (torch.randn(experts, 2 * expert_width, width) * width**-0.5).half()
    down = (torch.randn(experts, width, expert_width) * expert_width**-0.5).half()
    # Transposed, as a view may be.
    weights = torch.rand(slots, tokens).t()
    given = (x, weights, gate_up, down)

    inputs = [tensor.detach().requires_grad_() for tensor in given]
    y = expert_mlp(inputs[0], ids, *inputs[1:])
    got = [y, *torch.autograd.grad(y, inputs, grad)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    want = by_token(ids, *wide)
    wanted = [want, *torch.autograd.grad(want, wide, grad.double())]
    errors = [relative_error(one, other) for one, other in zip(got, wanted, strict=True)]
    sys.stdout.write(json.dumps(errors))


def by_token(ids, x, weights, gate_up, down):
    """The layer, token by token and slot by slot."""
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        row = torch.zeros_like(x[t])
        for k, e in enumerate(chosen):
            if e < len(down):
                row = row + weights[t, k] * expert(x[t], gate_up[e], down[e])
        rows.append(row)
    return torch.stack(rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
