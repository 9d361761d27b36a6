"""Expert load: which expert of which layer got how much.

Letters: S step columns, L layers, E experts. A load of 1 is an even share: tokens of an expert
divided by the mean over the layer's experts. Counts of all ranks are added; rows that a later
attempt replaced are left out. A count that was not recorded is NaN, never 0: no token is a finding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nviz.store.experts import Block, ExpertLoads

Array = NDArray[np.float64]
Steps = NDArray[np.int64]

DEAD_STEPS = 50
STARVED_BELOW = 0.1


@dataclass(frozen=True, slots=True)
class LoadMap:
    """Load of one layer over time: `load_ES` of each column's steps, `step_S` the first step of
    each.
    """

    step_S: Steps
    load_ES: Array


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """Load of every layer at one step. A layer with fewer experts than others ends in NaN."""

    step: int
    layers: list[int]
    load_LE: Array


@dataclass(frozen=True, slots=True)
class LayerBias:
    """Balancing bias of every expert of every layer at one step; narrower layers end in NaN."""

    step: int
    layers: list[int]
    bias_LE: Array


@dataclass(frozen=True, slots=True)
class ImbalanceMap:
    """Busiest expert over the mean of every layer over time: `imbalance_LS` of each column."""

    step_S: Steps
    layers: list[int]
    imbalance_LS: Array


@dataclass(frozen=True, slots=True)
class Idle:
    """Experts of a layer with no token (dead) or below a tenth of an even share (starved)."""

    layer: int
    dead: list[int]
    starved: list[int]


def layers(blocks: Sequence[Block]) -> list[int]:
    """Numbers of the MoE layers at the newest step, ascending."""
    newest = _newest(blocks)
    return sorted(newest.layers) if newest else []


def steps(blocks: Sequence[Block]) -> Steps:
    """All steps with a recorded load, ascending."""
    if not blocks:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.concatenate([block.step_S for block in blocks]))


def _newest(blocks: Sequence[Block]) -> Block | None:
    return max(blocks, key=lambda block: (block.attempt, int(block.step_S.max())), default=None)


def load_map(blocks: Sequence[Block], layer: int, columns: int = 200) -> LoadMap:
    """Load of `layer`'s experts over the steps, averaged into at most `columns` columns."""
    step_S, counts_SE = layer_counts(blocks, layer)
    if len(step_S) == 0:
        return LoadMap(np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
    starts = _starts(len(step_S), columns)
    sums_SE, known_SE = _sums(counts_SE, starts)
    with np.errstate(invalid="ignore"):
        return LoadMap(step_S[starts], _relative(sums_SE / known_SE).T)


def _sums(values: Array, starts: NDArray[np.int64], axis: int = 0) -> tuple[Array, Array]:
    """Sums of the known values of each stretch along `axis`, and how many those are."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=axis)
    return sums, np.add.reduceat(known.astype(np.float64), starts, axis=axis)


def _starts(count: int, columns: int) -> NDArray[np.int64]:
    """Where each of at most `columns` stretches of `count` rows begins; all but the last are of one
    length, so that steps at even distances make columns at even distances.
    """
    return np.arange(0, count, -(-count // columns), dtype=np.int64)


def imbalance_map(blocks: Sequence[Block], columns: int = 200) -> ImbalanceMap:
    """Load imbalance of every layer over the steps, averaged into at most `columns` columns.

    Of a step that several ranks recorded the first one counts here.
    """
    step_S = steps(blocks)
    found = sorted({layer for block in blocks for layer in block.layers})
    whole_LS = np.full((len(found), len(step_S)), np.nan)
    for block in blocks:
        at_S = np.searchsorted(step_S, block.step_S)
        value_SL = _imbalance(block.load_SLE)
        for column, layer in enumerate(block.layers):
            row_S = whole_LS[found.index(layer)]
            free = np.isnan(row_S[at_S])
            row_S[at_S[free]] = value_SL[free, column]
    if len(step_S) == 0:
        return ImbalanceMap(step_S, found, whole_LS)
    starts = _starts(len(step_S), columns)
    sums_LS, counts_LS = _sums(whole_LS, starts, axis=1)
    with np.errstate(invalid="ignore"):
        return ImbalanceMap(step_S[starts], found, sums_LS / counts_LS)


def _imbalance(load_SLE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Busiest expert over the mean (S, L); NaN where no token was routed."""
    # Looking past NaN takes five times as long, and only narrower layers end in it.
    padded = bool(np.isnan(load_SLE[:1]).any())
    mean = np.nanmean if padded else np.mean
    highest = np.nanmax if padded else np.max
    mean_SL = mean(load_SLE, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(mean_SL > 0, highest(load_SLE, axis=-1) / mean_SL, np.nan)


def layer_counts(
    blocks: Sequence[Block], layer: int, since: int | None = None
) -> tuple[Steps, Array]:
    """Steps, ascending, and tokens per expert of `layer`, ranks added; from step `since` on."""
    steps_found, loads_found = [], []
    for block in blocks:
        if layer not in block.layers:
            continue
        load_SE = block.load_SLE[:, block.layers.index(layer)]
        keep = slice(None) if since is None else block.step_S >= since
        steps_found.append(block.step_S[keep])
        loads_found.append(_without_padding(load_SE[keep]))
    return _summed(steps_found, loads_found)


def _without_padding(load_SE: NDArray[np.float32]) -> NDArray[np.float32]:
    """The layer's own experts: a narrower layer than others ends in NaN."""
    if load_SE.size == 0 or not np.isnan(load_SE[0, -1]):
        return load_SE
    known = np.flatnonzero(~np.isnan(load_SE).all(axis=0))
    return load_SE[:, : int(known[-1]) + 1 if len(known) else 0]


def _summed(
    steps_found: list[Steps], loads_found: list[NDArray[np.float32]]
) -> tuple[Steps, Array]:
    """Steps and the sum of each step's rows; rows of an uncommon number of experts are left out."""
    sizes = Counter[int]()
    for load_SE in loads_found:
        sizes[load_SE.shape[1]] += len(load_SE)
    if not sizes.total():
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0))
    width = sizes.most_common(1)[0][0]
    fitting = [at for at, load_SE in enumerate(loads_found) if load_SE.shape[1] == width]
    step_N = np.concatenate([steps_found[at] for at in fitting])
    load_NE = np.concatenate([loads_found[at] for at in fitting]).astype(np.float64)
    order = np.argsort(step_N, kind="stable")
    step_S, first = np.unique(step_N[order], return_index=True)
    sums_SE, known_SE = _sums(load_NE[order], first)
    return step_S, np.where(known_SE > 0, sums_SE, np.nan)


def _relative(counts: Array) -> Array:
    """Counts divided by the mean over the known ones of the last axis (E); NaN where no token was
    routed.
    """
    known = np.isfinite(counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, counts, 0.0).sum(-1, keepdims=True) / known.sum(-1, keepdims=True)
        return np.where(mean > 0, counts / mean, np.nan)


def loads_at(blocks: Sequence[Block], step: int | None = None) -> LayerLoads | None:
    """Load of all layers at the newest step recorded at or before `step` (None: the newest of all).

    None before the first.
    """
    recorded = steps(blocks)
    if step is not None:
        recorded = recorded[recorded <= step] if (recorded <= step).any() else recorded[:1]
    if len(recorded) == 0:
        return None
    wanted = int(recorded[-1])
    rows: dict[int, Array] = {}
    for block in blocks:
        for load_LE in block.load_SLE[block.step_S == wanted]:
            for layer, load_E in zip(block.layers, load_LE, strict=True):
                own = _without_padding(load_E[None])[0].astype(np.float64)
                known = rows.get(layer)
                rows[layer] = own if known is None or len(known) != len(own) else known + own
    width = max(len(load_E) for load_E in rows.values())
    load_LE = np.full((len(rows), width), np.nan)
    for at, layer in enumerate(sorted(rows)):
        load_LE[at, : len(rows[layer])] = _relative(rows[layer])
    return LayerLoads(wanted, sorted(rows), load_LE)


def bias_at(loads: ExpertLoads, step: int) -> LayerBias | None:
    """The bias recorded at `step`; None where there is none, or all of it is 0."""
    found = loads.bias_at(step)
    if found is None or not np.nan_to_num(found[1]).any():
        return None
    layers, bias_LE = found
    order = np.argsort(layers)
    return LayerBias(step, [layers[at] for at in order], bias_LE[order].astype(np.float64))


def idle_experts(blocks: Sequence[Block], last: int = DEAD_STEPS) -> tuple[int, list[Idle]]:
    """How many of the `last` recorded steps there were, and the layers with idle experts."""
    recent = steps(blocks)[-last:]
    if len(recent) == 0:
        return 0, []
    found = []
    near = [block for block in blocks if block.step_S.max() >= recent[0]]
    for layer in sorted({layer for block in near for layer in block.layers}):
        _, counts_SE = layer_counts(near, layer, since=int(recent[0]))
        if counts_SE.size == 0:
            continue
        (sums_E,), (known_E,) = _sums(counts_SE, np.zeros(1, dtype=np.int64))
        with np.errstate(invalid="ignore"):
            load_E = _relative(sums_E / known_E)
        dead = np.flatnonzero(load_E == 0).tolist()
        starved = np.flatnonzero((load_E > 0) & (load_E < STARVED_BELOW)).tolist()
        if dead or starved:
            found.append(Idle(layer, dead, starved))
    return len(recent), found


def load_map_table(found: LoadMap) -> pa.Table:
    """A row a step column, a column an expert, for a download."""
    loads = {f"expert {at}": load_S for at, load_S in enumerate(found.load_ES)}
    return pa.table({"step": found.step_S} | loads)


def imbalance_table(found: ImbalanceMap) -> pa.Table:
    """A row a step column, a column a layer, for a download."""
    rows = zip(found.layers, found.imbalance_LS, strict=True)
    return pa.table({"step": found.step_S} | {f"layer {layer}": row_S for layer, row_S in rows})


def bias_table(found: LayerBias) -> pa.Table:
    """A row a layer, a column an expert, for a download."""
    biases = {f"expert {at}": bias_L for at, bias_L in enumerate(found.bias_LE.T)}
    return pa.table({"layer": found.layers} | biases)


def layer_loads_table(found: LayerLoads) -> pa.Table:
    """A row a layer, a column an expert, for a download."""
    loads = {f"expert {at}": load_L for at, load_L in enumerate(found.load_LE.T)}
    return pa.table({"layer": found.layers} | loads)
