"""The layout of a run: how many ranks in each dimension, and which of them this process is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nmoe_train.config import ParallelConfig
from nmoe_train.errors import TrainError


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions and this process's place in them."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rank: int = 0

    @property
    def ranks(self) -> int:
        """Processes of the run: dp * tp * pp, as ep folds over dp * tp."""
        return self.dp * self.tp * self.pp

    @property
    def data_rank(self) -> int:
        """Which share of every batch this process computes, 0 .. dp-1."""
        return self.rank // (self.tp * self.pp)

    def sizes(self) -> dict[str, int]:
        """The four sizes by name, for run.json and checkpoints."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}


def current_layout(config: ParallelConfig, environment: Mapping[str, str] = os.environ) -> Layout:
    """The layout of this process, from the configuration and torchrun's RANK and WORLD_SIZE.

    Raises TrainError (`E-LAYOUT`) when they do not agree, or ask for more than one process.
    """
    layout = Layout(
        config.dp, config.tp, config.pp, config.ep, rank=_number("RANK", 0, environment)
    )
    processes = _number("WORLD_SIZE", 1, environment)
    if (layout.dp, layout.tp, layout.pp, layout.ep) != (1, 1, 1, 1):
        raise TrainError(
            "E-LAYOUT",
            f"parallel asks for dp={layout.dp} tp={layout.tp} pp={layout.pp} ep={layout.ep}, and "
            "this version trains on one process",
            "set parallel.dp, tp, pp and ep to 1",
        )
    if processes != layout.ranks:
        raise TrainError(
            "E-LAYOUT",
            f"{processes} processes were started for a layout of {layout.ranks}",
            f"start {layout.ranks}, or change the sizes under parallel",
        )
    return layout


def _number(name: str, default: int, environment: Mapping[str, str]) -> int:
    value = environment.get(name, str(default))
    if not value.isdecimal():
        raise TrainError(
            "E-LAYOUT",
            f"the environment's {name} is {value!r}",
            "start with torchrun, which sets it, or unset it",
        )
    return int(value)
