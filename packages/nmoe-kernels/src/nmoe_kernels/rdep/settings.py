"""How the ranks of an expert-parallel group exchange tokens."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from nmoe_kernels.errors import KernelError

TransportName = Literal["local", "collective", "p2p", "nvshmem"]
Overflow = Literal["error", "drop", "reroute"]
Keep = Literal["keep", "fetch"]


@dataclass(frozen=True)
class Settings:
    """transport: None picks one that fits. capacity: "exact" takes every assignment; a factor lets
    an expert take at most ceil(capacity * T_max * K / E) assignments of one source. overflow: what
    happens to those beyond that: "error" counts them for `ExpertParallel.check`, "drop" leaves them
    out, "reroute" offers them to the next best experts. deadline_s: how long a peer is waited for,
    in seconds. keep: the backward keeps the rows that it received ("keep"), or has them sent once
    more ("fetch"), which saves their memory in between.

    Raises KernelError (E-RDEP-SETTINGS), which names the field.
    """

    transport: TransportName | None = None
    capacity: float | Literal["exact"] = "exact"
    overflow: Overflow = "error"
    deadline_s: float = 300.0
    keep: Keep = "keep"

    def __post_init__(self) -> None:
        transports = (None, *get_args(TransportName))
        _require(self.transport in transports, "transport", self.transport, _one_of(transports))
        good_capacity = self.capacity == "exact" or _is_positive(self.capacity)
        _require(good_capacity, "capacity", self.capacity, "'exact' or a number above 0")
        for field, kinds in (("overflow", Overflow), ("keep", Keep)):
            value, choices = getattr(self, field), get_args(kinds)
            _require(value in choices, field, value, _one_of(choices))
        _require(_is_positive(self.deadline_s), "deadline_s", self.deadline_s, "above 0")


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def _one_of(choices: tuple[object, ...]) -> str:
    return "one of " + ", ".join(repr(choice) for choice in choices)


def _require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise KernelError("E-RDEP-SETTINGS", f"rdep.{field} is {value!r}", f"make it {wanted}")
