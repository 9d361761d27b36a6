"""Other Mixture-of-Experts layers on the same weights and tokens, each behind a small adapter.

A peer is asked by name. One that is not installed, or that cannot compute on this device, says why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nmoe_kernels.bench.peers import liger, plain, sonicmoe
from nmoe_kernels.bench.peers.layer import PeerLayer
from nmoe_kernels.bench.problem import Problem


@dataclass(frozen=True)
class Peer:
    """why_absent(device type, dtype): why it cannot run, or "". build: its layer on a problem."""

    why_absent: Callable[[str, torch.dtype], str]
    build: Callable[[Problem], PeerLayer]
    note: str


PEERS: Mapping[str, Peer] = {
    "torch_eager": Peer(plain.why_absent, plain.eager_layer, plain.NOTE),
    "torch_compiled": Peer(plain.why_not_compiled, plain.compiled_layer, plain.NOTE),
    "sonicmoe": Peer(sonicmoe.why_absent, sonicmoe.build, sonicmoe.NOTE),
    "liger": Peer(liger.why_absent, liger.build, liger.NOTE),
}

__all__ = ["PEERS", "Peer", "PeerLayer"]
