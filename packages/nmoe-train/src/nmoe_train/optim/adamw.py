"""AdamW (Loshchilov and Hutter 2019) over fp32 master weights, in groups with their own rates.

Four groups: dense matrices (decayed), dense vectors and embeddings (not decayed), routers, routed
experts. torch's fused AdamW does the update.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nmoe_train.config import OptimizerConfig
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.tensor import local


class GuardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, whose kernel skips the whole update where `found_inf` is 1.

    That is how torch's gradient scaler skips a step too: no host read decides it.
    """

    found_inf: Tensor | None = None


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> GuardedAdamW:
    """AdamW whose groups carry `name` ("dense", "router", "expert") and `peak_lr`."""
    rates = {
        "dense": config.lr,
        "router": config.lr_router or config.lr,
        "expert": config.lr_expert or config.lr,
    }
    # All of them on every stage of a pipeline, also where it has none of the weights.
    kinds = [(group, True, False) for group in ("dense", "expert")]
    kinds += [(group, False, False) for group in ("dense", "router")]
    members: dict[tuple[str, bool, bool], list[Tensor]] = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        group = _group_of(name)
        decays = group != "router" and parameter.ndim > 1 and "embedding" not in name
        # One kernel updates either weights that are whole here or those that are cut over ranks.
        members.setdefault((group, decays, isinstance(parameter, DTensor)), []).append(parameter)
    groups = [
        {
            "params": parameters,
            "name": group,
            "peak_lr": rates[group],
            "lr": rates[group],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for (group, decays, _), parameters in members.items()
    ]
    return GuardedAdamW(groups, betas=config.betas, eps=config.eps, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Sets every group's rate to its peak times `factor`; returns the rates as `lr/<group>`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return {f"lr/{group['name']}": group["lr"] for group in optimizer.param_groups}


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


def _group_of(name: str) -> str:
    if ".router." in name:
        return "router"
    return "expert" if STACKED_EXPERTS.search(name) else "dense"
