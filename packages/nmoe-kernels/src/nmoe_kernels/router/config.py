"""What a router is told (RouterConfig) and what it answers (Routing).

Letters: T tokens, K experts per token, E experts.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nmoe_kernels.errors import KernelError


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    experts: E. top_k: K, the experts of one token. score: what logits become before the choice.
    groups, top_groups: experts are cut into `groups` equal runs and a token chooses only inside its
    best `top_groups` of them (DeepSeek-V2 and V3). renormalise: a token's K weights sum to `scale`.
    scale: multiplies the weights. capacity_factor: an expert takes at most
    ceil(capacity_factor * T * K / E) assignments of one call; None means no limit. overflow: what
    happens beyond that, "drop" or "reroute" (see `apply_capacity`).

    Raises KernelError (E-ROUTER-CONFIG), which names the field.
    """

    experts: int
    top_k: int
    score: Literal["sigmoid", "softmax"]
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0
    capacity_factor: float | None = None
    overflow: Literal["drop", "reroute"] = "drop"

    def __post_init__(self) -> None:
        self._check_choice()
        _require(math.isfinite(self.scale) and self.scale > 0, "scale", self.scale, "above 0")
        factor = self.capacity_factor
        good_factor = factor is None or (math.isfinite(factor) and factor > 0)
        _require(good_factor, "capacity_factor", factor, "above 0, or None")
        _require(self.overflow in ("drop", "reroute"), "overflow", self.overflow, "drop or reroute")

    def _check_choice(self) -> None:
        _require(self.experts >= 1, "experts", self.experts, "1 or more")
        _require(1 <= self.top_k <= self.experts, "top_k", self.top_k, f"1 to {self.experts}")
        _require(self.score in ("sigmoid", "softmax"), "score", self.score, "sigmoid or softmax")
        divides = self.groups >= 1 and self.experts % self.groups == 0
        _require(divides, "groups", self.groups, f"a divisor of {self.experts}")
        in_range = 1 <= self.top_groups <= self.groups
        _require(in_range, "top_groups", self.top_groups, f"1 to {self.groups}")
        reachable = self.top_groups * (self.experts // self.groups)
        _require(self.top_k <= reachable, "top_k", self.top_k, f"at most {reachable}, what is left")


def _require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise KernelError("E-ROUTER-CONFIG", f"router.{field} is {value!r}", f"make it {wanted}")


@dataclass
class Routing:
    """What the router decided for T tokens.

    ids_TK: int64, the experts of each token, best first, distinct, in [0, E); only `apply_capacity`
    writes E, which means that the assignment was dropped. weights_TK: what each expert's output is
    multiplied by, differentiable. logits_TE: differentiable; zeros in a row whose logits were not
    finite. score: what makes scores of them. valid_T: bool, False for a row that was not finite.
    invalid: int64 scalar, how many they are. load_E: int64, the tokens that chose each expert,
    before capacity. dropped: int64 scalar, assignments that capacity dropped.

    Floats are fp32 (fp64 when the router's weight is fp64).
    """

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor
    score: Literal["sigmoid", "softmax"]
    load_E: Tensor
    invalid: Tensor
    valid_T: Tensor
    dropped: Tensor

    @property
    def scores_TE(self) -> Tensor:
        """Softmax or sigmoid of the logits, differentiable, computed anew at each access."""
        return scores_of(self.logits_TE, self.score)


def scores_of(logits_TE: Tensor, score: Literal["sigmoid", "softmax"]) -> Tensor:
    """What logits become before the choice."""
    return logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()


# FSDP and checkpointing look for tensors in a module's outputs by walking pytrees; an unknown class
# is a leaf to them, and a loss on `logits_TE` alone would then reach parameters that are not
# gathered.
torch.export.register_dataclass(Routing)
