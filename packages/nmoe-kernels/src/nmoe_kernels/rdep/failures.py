"""The errors of an exchange, worded alike by every transport: which rank, which layer, which epoch.

Ranks are named by their number in the whole job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nmoe_kernels.errors import KernelError


@dataclass(frozen=True)
class Place:
    """Where an exchange stands: the caller's name of the layer, the phase, and the epoch."""

    layer: str
    phase: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.phase} of layer {self.layer or 'without a name'}, epoch {self.epoch}"


def late(ranks: Sequence[int], place: Place, deadline_s: float) -> KernelError:
    """E-RDEP-LATE: peers did not arrive within the deadline."""
    return KernelError(
        "E-RDEP-LATE",
        f"{_named(ranks)} did not take part in the {place} within {deadline_s:g} s",
        "see what is slow over there, or raise rdep.deadline_s",
    )


def gone(ranks: Sequence[int], place: Place) -> KernelError:
    """E-RDEP-PEER: the connection to peers is closed."""
    return KernelError(
        "E-RDEP-PEER",
        f"{_named(ranks)} left while this rank was in the {place}",
        "read the error over there and start the job again",
    )


def out_of_order(rank: int, place: Place) -> KernelError:
    """E-RDEP-ORDER: a peer is in another exchange than this rank."""
    return KernelError(
        "E-RDEP-ORDER",
        f"rank {rank} is not in the {place}, where this rank is",
        "make every rank run the same layers in the same order, with the same settings",
    )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
