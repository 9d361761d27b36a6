"""AdamW (Loshchilov and Hutter 2019) over fp32 master weights, and the limit on their gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nmoe_train.model.tensor import local


class GuardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, whose kernel skips the whole update where `found_inf` is 1.

    That is how torch's gradient scaler skips a step too: no host read decides it.
    """

    found_inf: Tensor | None = None


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], limit: float, norm: Tensor | None = None
) -> Tensor:
    """Scales all gradients down to a global norm of `limit` (0: never); returns the norm before.

    `norm`: that of all ranks' gradients; taken of these where they are all there are. It is a fp32
    scalar on the parameters' device, and no host read is made. A norm that is not finite leaves the
    gradients as they are.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if norm is None:
        norm = torch.nn.utils.get_total_norm(gradients)
    if limit > 0:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
        torch._foreach_mul_(gradients, scale)
    return norm
