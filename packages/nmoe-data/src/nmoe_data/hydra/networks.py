"""Training of the judge heads, and the judge head over token states, the one that needs torch.

Both kinds are trained alike: their last layer starts at zero, so the judge starts as the probe and
learns to correct it (Huber loss, AdamW); after each pass the validation part decides, and the best
state stays, be it the first. A pairwise ranking term was measured and brought nothing.

Letters: N documents, B of a batch, L tokens of the longest, W width of the encoder, C width of the
head, D dimensions of the rubric, P inputs.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmoe_data.hydra.encoder.contract import FloatArray

BATCH = 64
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
DROPOUT = 0.2
MAX_PASSES = 100
PATIENCE = 12
HIDDEN = (256, 128)

Report = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What a head learns, N documents in all.

    base, labels: float32 [N, D], the probe's scores and the judge's. train, validation: row
    numbers. seed: of the first weights, the order and the dropout. report: called after each pass
    with its number, the most there can be, and the validation error; may raise to stop.
    """

    base: FloatArray
    labels: FloatArray
    train: Sequence[int]
    validation: Sequence[int]
    seed: int
    report: Report


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training went: passes made, the best one (0 is the probe itself), its error (mean
    square on the validation part) and the probe's."""

    passes: int
    best_pass: int
    error: float
    probe_error: float


def train_pooled(
    inputs: FloatArray, task: Task
) -> tuple[tuple[tuple[FloatArray, FloatArray], ...], Outcome]:
    """Trains a multi-layer perceptron on standardised inputs [N, P]; returns its layers as numpy.

    One thread, so that the same seed gives the same bytes on any number of cores.
    """
    with _seeded(task.seed, threads=1):
        widths = (inputs.shape[1], *HIDDEN)
        parts: list[nn.Module] = [nn.Dropout(DROPOUT / 2)]
        for size, following in pairwise(widths):
            parts += [nn.Linear(size, following), nn.ReLU(), nn.Dropout(DROPOUT)]
        network = nn.Sequential(*parts, _zero_linear(widths[-1], task.labels.shape[1]))
        x = torch.from_numpy(inputs)
        outcome = _fit(network, lambda rows: network(x[rows]), task)
    linears = [part for part in network if isinstance(part, nn.Linear)]
    layers = tuple((_numpy(part.weight.T), _numpy(part.bias)) for part in linears)
    return layers, outcome


def _zero_linear(size: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(size, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _numpy(tensor: Tensor) -> FloatArray:
    return np.ascontiguousarray(tensor.detach().cpu().float().numpy())


@contextmanager
def _seeded(seed: int, threads: int | None = None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)


def _fit(network: nn.Module, forward: Callable[[Tensor], Tensor], task: Task) -> Outcome:
    """Trains `network`, through which `forward` maps row numbers to corrections, in place."""
    device = next(network.parameters()).device
    base, labels = (torch.from_numpy(part).to(device) for part in (task.base, task.labels))
    train, validation = (
        torch.tensor(rows, device=device) for rows in (task.train, task.validation)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def error() -> float:
        network.eval()
        with torch.no_grad():
            parts = validation.split(BATCH)
            got = torch.cat([forward(rows) + base[rows] for rows in parts]).clamp(0, 5)
        return float((got - labels[validation]).square().mean())

    first = best = error()
    best_pass, state = 0, copy.deepcopy(network.state_dict())
    number = 0
    for number in range(1, MAX_PASSES + 1):
        network.train()
        for rows in train[torch.randperm(len(train)).to(device)].split(BATCH):
            loss = nn.functional.huber_loss(forward(rows) + base[rows], labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        now = error()
        task.report(number, MAX_PASSES, now)
        if now < best:
            best, best_pass, state = now, number, copy.deepcopy(network.state_dict())
        elif number - best_pass >= PATIENCE:
            break
    network.load_state_dict(state)
    network.eval()
    return Outcome(number, best_pass, best, first)


class TokenNetwork(nn.Module):
    """Token states to corrections: a projection, a learned query in front, two encoder layers.

    Padding is masked, so a document's result does not depend on what it is batched with.
    """

    def __init__(self, width: int, outputs: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, hidden)
        self.query = nn.Parameter(torch.randn(1, 1, hidden) * hidden**-0.5)
        layer = nn.TransformerEncoderLayer(
            hidden,
            heads,
            dim_feedforward=4 * hidden,
            dropout=DROPOUT / 2,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(hidden), enable_nested_tensor=False
        )
        self.output = _zero_linear(hidden, outputs)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Maps states [B, L, W] to [B, D]; padding: bool [B, L], true where there is no token."""
        x = self.projection(self.norm(x))
        x = torch.cat([self.query.expand(len(x), -1, -1), x], dim=1)
        mask = nn.functional.pad(padding, (1, 0), value=False)
        result: Tensor = self.output(self.encoder(x, src_key_padding_mask=mask)[:, 0])
        return result


@dataclass(frozen=True, slots=True)
class TokenJudge:
    """A judge head over token states. max_tokens: how many of a document it reads at most."""

    network: TokenNetwork
    sizes: dict[str, int]
    max_tokens: int
    kind: str = field(default="transformer")

    def corrections(self, states: Sequence[FloatArray]) -> FloatArray:
        """Returns float32 [N, D] for states [L_n, W] per document."""
        result = np.empty((len(states), self.sizes["outputs"]), np.float32)
        order = sorted(range(len(states)), key=lambda row: len(states[row]))
        device = next(self.network.parameters()).device
        with torch.no_grad():
            for first in range(0, len(order), BATCH):
                rows = order[first : first + BATCH]
                batch = padded([states[row] for row in rows])
                got = self.network(*(part.to(device) for part in batch))
                result[rows] = got.float().cpu().numpy()
        return result

    def tensors(self) -> dict[str, FloatArray]:
        """Returns what judge.safetensors holds."""
        return {name: _numpy(tensor) for name, tensor in self.network.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        """Returns the sizes that head.json names."""
        return {"sizes": self.sizes, "max_tokens": self.max_tokens}

    @classmethod
    def from_tensors(cls, settings: dict[str, Any], tensors: dict[str, FloatArray]) -> "TokenJudge":
        """Returns the head that `tensors` and `settings` came from."""
        network = TokenNetwork(**settings["sizes"])
        network.load_state_dict({name: torch.from_numpy(part) for name, part in tensors.items()})
        network.eval()
        return cls(network, settings["sizes"], settings["max_tokens"])


def padded(states: Sequence[FloatArray]) -> tuple[Tensor, Tensor]:
    """Returns float32 [B, L, W] and the mask of its padding, bool [B, L]."""
    longest = max(len(part) for part in states)
    x = np.zeros((len(states), longest, states[0].shape[1]), np.float32)
    padding = np.ones((len(states), longest), bool)
    for row, part in enumerate(states):
        x[row, : len(part)] = part
        padding[row, : len(part)] = False
    return torch.from_numpy(x), torch.from_numpy(padding)


def train_tokens(
    states: Sequence[FloatArray], max_tokens: int, task: Task, device: str = "cpu"
) -> tuple[TokenJudge, Outcome]:
    """Trains a small transformer on the token states of N documents, [L_n, W] each."""
    sizes = {
        "width": states[0].shape[1],
        "outputs": task.labels.shape[1],
        "hidden": 128,
        "layers": 2,
        "heads": 4,
    }
    with _seeded(task.seed):
        network = TokenNetwork(**sizes).to(device)

        def forward(rows: Tensor) -> Tensor:
            batch = padded([states[row] for row in rows.tolist()])
            result: Tensor = network(*(part.to(device) for part in batch))
            return result

        outcome = _fit(network, forward, task)
    return TokenJudge(network.cpu(), sizes, max_tokens), outcome
