"""Which layers each part of a pipeline holds: consecutive ones, the most costly part least so.

Costs are those of `model.costs`; the embedding's count on the first part and the output
projection's on the last. Among the splits whose most costly part costs least, one is taken whose
largest part has the fewest weights. Both by dynamic programming over the last cut.

Letters: L layers, N parts.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from nmoe_train.model.costs import Cost


def split_layers(layers: Sequence[Cost], first: Cost, last: Cost, parts: int) -> list[range]:
    """The layers of each part, at least one in each; `first` and `last` add to the end parts.

    Their number must be at least that of the parts.
    """
    assert 1 <= parts <= len(layers)
    flops = _range_sums([cost.flops for cost in layers], first.flops, last.flops, parts)
    weights = _range_sums([cost.weights for cost in layers], first.weights, last.weights, parts)
    # A little more than the least, so that sums in another order are not another split.
    bound = _least_maximum(len(layers), parts, flops)[0] * (1 + 1e-9)
    _, cuts = _least_maximum(
        len(layers),
        parts,
        lambda n, a, b: weights(n, a, b) if flops(n, a, b) <= bound else float("inf"),
    )
    return [range(start, stop) for start, stop in pairwise(cuts)]


def given_split(counts: Sequence[int]) -> list[range]:
    """The layers of each part, where their numbers are given."""
    cuts = [0, *accumulate(counts)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


PartCost = Callable[[int, int, int], float]


def _range_sums(costs: Sequence[float], first: float, last: float, parts: int) -> PartCost:
    """Cost of part n when it holds the layers from a to b."""
    total = [0.0, *accumulate(costs)]

    def cost(part: int, start: int, stop: int) -> float:
        ends = (first if part == 0 else 0.0) + (last if part == parts - 1 else 0.0)
        return total[stop] - total[start] + ends

    return cost


def _least_maximum(layers: int, parts: int, cost: PartCost) -> tuple[float, list[int]]:
    """The least possible cost of the most costly part, and the cuts 0 .. L that give it."""
    infinite = float("inf")
    best = [[infinite] * (layers + 1) for _ in range(parts + 1)]
    cut = [[0] * (layers + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        # Each part before has a layer at least, and so has each one after.
        for stop in range(part, layers - (parts - part) + 1):
            for start in range(part - 1, stop):
                worst = max(best[part - 1][start], cost(part - 1, start, stop))
                if worst < best[part][stop]:
                    best[part][stop], cut[part][stop] = worst, start
    cuts = [layers]
    for part in range(parts, 0, -1):
        cuts.append(cut[part][cuts[-1]])
    return best[parts][layers], cuts[::-1]
