"""Layers are split where the most costly part costs least: against every possible split."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import pytest
from nmoe_train.config import Config
from nmoe_train.model.costs import Cost, count_weights, layer_cost
from nmoe_train.parallel.split import given_split, split_layers

Tiny = Callable[..., Config]


def every_split(layers: int, parts: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, layers), parts - 1):
        edges = [0, *cuts, layers]
        yield [range(a, b) for a, b in pairwise(edges)]


def worst(split: list[range], layers: list[Cost], first: Cost, last: Cost) -> tuple[float, float]:
    """Most FLOPs of a part, and most weights."""
    held = [[layers[number] for number in part] for part in split]
    held[0].append(first)
    held[-1].append(last)
    return (
        max(sum(cost.flops for cost in part) for part in held),
        max(sum(cost.weights for cost in part) for part in held),
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_is_better(seed: int) -> None:
    draw = random.Random(seed)
    # Few values, so that many splits are as good and the weights decide.
    layers = [Cost(draw.choice([1, 2, 5]), draw.choice([1, 3])) for _ in range(draw.randint(1, 9))]
    first, last = Cost(0, draw.choice([0, 6])), Cost(draw.choice([0, 4]), 2)
    for parts in range(1, len(layers) + 1):
        found = split_layers(layers, first, last, parts)
        possible = [worst(split, layers, first, last) for split in every_split(len(layers), parts)]
        assert worst(found, layers, first, last) == min(possible)
        assert [number for part in found for number in part] == list(range(len(layers)))
        assert all(len(part) >= 1 for part in found)


def test_a_head_that_costs_as_much_as_two_layers_leaves_its_part_two_fewer() -> None:
    layers = [Cost(1, 1)] * 10
    assert split_layers(layers, Cost(0, 5), Cost(2, 5), 4) == given_split([3, 3, 3, 1])


def test_the_costs_of_all_parts_are_those_of_the_model(
    tiny: Tiny, build: Callable[..., object]
) -> None:
    import torch

    for changes in (
        {"model.layers": 4, "model.moe.shared_experts": 2},
        {"model.attention.q_lora_rank": 10, "model.dense_layers": 0},
        {"model.attention.kind": "gqa", "model.attention.kv_heads": 1},
        {"model.tie_embeddings": True},
    ):
        config = tiny(**changes).model
        model = build(tiny(**changes))
        assert isinstance(model, torch.nn.Module)
        held = {name: parameter.numel() for name, parameter in model.named_parameters()}
        assert count_weights(config, 257) == sum(held.values())
        for number in range(config.layers):
            layer = sum(count for name, count in held.items() if f"layers.{number}." in name)
            assert layer_cost(config, number, 16).weights == layer
