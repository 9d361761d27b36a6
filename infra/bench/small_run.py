"""A small layer on the fused kernels, router included, forward and backward, for `sanitize.sh`.

Sizes are cut so that every mask matters: experts without a token, dropped assignments, tiles that
hang over the edge of a width, a row that is not finite, both ways of keeping h.
"""

import sys

import torch
from nmoe_kernels import MoE, RouterConfig
from nmoe_kernels.hardware import FUSED, why_unusable

CASES = (
    # tokens, width, expert width, router, recompute
    (77, 200, 72, RouterConfig(8, 2, "softmax"), False),
    (150, 264, 136, RouterConfig(16, 4, "sigmoid", groups=4, top_groups=2), True),
    (40, 64, 32, RouterConfig(8, 3, "sigmoid", capacity_factor=0.75), False),
    (300, 72, 40, RouterConfig(48, 6, "softmax", renormalise=False), False),
)


def main() -> None:
    """Runs every case on each backend of ours and checks that all results are finite."""
    for backend in FUSED:
        refusal = why_unusable(backend, "cuda", torch.bfloat16)
        sys.stdout.write(f"{backend}: {refusal or 'runs'}\n")
        if refusal is None:
            run(backend)


def run(backend: str) -> None:
    """Runs every case on one backend."""
    for tokens, width, expert_width, config, recompute in CASES:
        layer = MoE(
            width,
            expert_width,
            config,
            backend=backend,
            recompute=recompute,
            device="cuda",
            dtype=torch.bfloat16,
        )
        layer.reset_parameters(torch.Generator("cuda").manual_seed(1))
        x = torch.randn(tokens, width, device="cuda").bfloat16()
        x[3, 1] = float("nan")
        x.requires_grad_()
        y, routing = layer(x)
        grads = torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))
        with torch.no_grad():
            layer(x)
        finite = all(bool(tensor.isfinite().all()) for tensor in (y, *grads))
        sys.stdout.write(f"{tokens},{width},{expert_width}: {int(routing.invalid)} bad row\n")
        if not finite:
            sys.exit("a result is not finite")


if __name__ == "__main__":
    main()
