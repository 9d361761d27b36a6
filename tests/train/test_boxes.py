"""Tensors that several ranks wrote in part: any reader gets any part of the whole."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_train.checkpoint.folder import SavedTensors
from nmoe_train.errors import TrainError
from nmoe_train.model.box import Box, whole_box
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up.weight"
WHOLE = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)


def boxes(rows: list[int], columns: list[int]) -> list[Box]:
    """All boxes between cuts of the rows and of the columns."""
    return [
        Box((a, c), (b - a, d - c), (7, 5))
        for a, b in itertools.pairwise(rows)
        for c, d in itertools.pairwise(columns)
    ]


def write(folder: Path, parts: list[Box]) -> dict[str, Any]:
    """Writes a file for each part, as ranks do; what meta.json says of the tensor."""
    pieces = []
    for rank, box in enumerate(parts):
        file = f"rank-{rank:05d}.safetensors"
        save_file({NAME: box.of(WHOLE).contiguous()}, folder / file)
        pieces.append({"file": file, "start": list(box.start), "shape": list(box.shape)})
    return {NAME: {"shape": [7, 5], "dtype": "float32", "pieces": pieces}}


@pytest.mark.parametrize(
    "cuts", [([0, 4, 7], [0, 5]), ([0, 7], [0, 2, 3, 5]), ([0, 3, 7], [0, 1, 5])]
)
def test_any_part_of_a_tensor_is_read_from_the_parts_that_ranks_wrote(
    tmp_path: Path, cuts: tuple[list[int], list[int]]
) -> None:
    saved = SavedTensors(tmp_path, write(tmp_path, boxes(*cuts)))
    assert saved.shape(NAME) == (7, 5)
    assert torch.equal(saved[NAME], WHOLE)
    draw = random.Random(0)
    for _ in range(40):
        rows, columns = (sorted(draw.sample(range(n + 1), 2)) for n in (7, 5))
        (wanted,) = boxes(rows, columns)
        assert torch.equal(saved.part(NAME, wanted), wanted.of(WHOLE))


def test_a_part_is_read_of_a_tensor_that_one_rank_wrote_whole(tmp_path: Path) -> None:
    save_file({NAME: WHOLE}, tmp_path / "all.safetensors")
    place = {"file": "all.safetensors", "shape": [7, 5], "dtype": "float32"}
    saved = SavedTensors(tmp_path, {NAME: place})
    (wanted,) = boxes([2, 6], [1, 3])
    assert torch.equal(saved.part(NAME, wanted), wanted.of(WHOLE))


def test_only_files_that_hold_some_of_what_is_wanted_are_opened(tmp_path: Path) -> None:
    places = write(tmp_path, boxes([0, 4, 7], [0, 5]))
    (tmp_path / "rank-00001.safetensors").unlink()
    saved = SavedTensors(tmp_path, places)
    (wanted,) = boxes([1, 4], [0, 5])
    assert torch.equal(saved.part(NAME, wanted), wanted.of(WHOLE))
    with pytest.raises(FileNotFoundError):
        saved[NAME]


def test_a_piece_that_nobody_wrote_is_an_error_and_not_memory_left_as_it_was(
    tmp_path: Path,
) -> None:
    places = write(tmp_path, boxes([0, 4, 7], [0, 2, 5]))
    del places[NAME]["pieces"][2]
    saved = SavedTensors(tmp_path, places)
    with pytest.raises(TrainError) as caught:
        saved.part(NAME, whole_box((7, 5)))
    assert caught.value.code == "E-CHECKPOINT-CORRUPT"
    assert NAME in str(caught.value)
