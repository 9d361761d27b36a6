"""What the stages of a pipeline hold and report: layers by cost, tied embeddings, waits."""

import re

import pytest
import torch
from layout_cases import ROWS, Trained
from layout_runs import metrics

pytestmark = pytest.mark.slow

PIPELINES = [row for row in ROWS if row.model.startswith("deep")]


def test_weights_start_the_same_on_any_stage_and_the_tied_ones_stay_so(trained: Trained) -> None:
    for row in PIPELINES:
        if row.sets["parallel.tp"] == 1 and "parallel.fsdp" not in row.sets:
            everything = trained.ranks(row.model)[0].weights("initial")
            found = [rank.weights("initial") for rank in trained.ranks(row.name)]
            assert set().union(*found) == everything.keys()
            for weights in found:
                assert all(torch.equal(weights[key], everything[key]) for key in weights)
        if row.model == "deep-tied":
            last = row.processes - row.processes // row.sets["parallel.pp"]
            ends = [trained.ranks(row.name)[rank].weights("final") for rank in (0, last)]
            assert torch.equal(*(weights["model.embedding.weight"] for weights in ends))


def layers_of(trained: Trained, name: str) -> list[list[int]]:
    """Numbers of the layers that each rank of a case holds."""
    held = []
    for rank in trained.ranks(name):
        names = " ".join(rank.weights("initial"))
        held.append(sorted({int(number) for number in re.findall(r"layers\.(\d+)\.", names)}))
    return held


def test_layers_are_spread_by_cost_or_as_given(trained: Trained) -> None:
    assert layers_of(trained, "deep-pp4-given") == [[0, 1], [2], [3], [4]]
    assert layers_of(trained, "deep-tied-pp2-interleaved") in (
        [[0, 2, 3], [1, 4]],
        [[0, 1, 3], [2, 4]],
    )
    # The output projection costs as much as a layer and a half.
    assert layers_of(trained, "deep-tied-dp2-pp2") == [[0, 1, 2]] * 2 + [[3, 4]] * 2


def test_every_rank_reports_the_wait_for_neighbours(trained: Trained) -> None:
    for row in PIPELINES:
        late = row.sets.get("parallel.pipeline.schedule") == "zero-bubble"
        for rank in range(row.processes):
            for record in metrics(trained.run(row.name), rank).values():
                assert record["time_ms/bubble"] > 0
                assert ("time_ms/weights" in record) == late


def test_every_pipeline_writes_the_same_text(trained: Trained) -> None:
    texts = [trained.ranks(name)[0].output for name in ("deep", "deep-pp2", "deep-pp4")]
    (written,) = {re.findall(r"continued by the model: .*", text)[0] for text in texts}
    assert len(written) > 25
