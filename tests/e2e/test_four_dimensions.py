"""Any composition of data, tensor, pipeline and expert parallelism trains as one process does.

`layout_cases` lists the layouts. They have grouped queries and latent attention, tied embeddings,
uneven splits, accumulation, sharded weights, all schedules, AdamW and Muon.
"""

import json

import pytest
from commands import checkpoint_hashes
from layout_cases import (
    JOURNEYS,
    MODELS,
    ROWS,
    STEPS,
    STOPPED,
    TERMINATED,
    Row,
    Trained,
    assert_trains_as_one_process,
)
from layout_runs import CURVES, assert_codes, assert_near, assert_near_state, metrics, saved

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_any_layout_trains_as_one_process_does(trained: Trained, row: Row) -> None:
    assert_trains_as_one_process(trained, row.name, row.model, STEPS)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_clipped(trained: Trained, model: str) -> None:
    norms = [row["grad_norm"] for row in metrics(trained.run(model)).values()]
    assert sum(norm > 1.0 for norm in norms) >= STEPS // 2


@pytest.mark.parametrize("run", JOURNEYS)
def test_a_run_goes_on_however_its_layers_weights_and_experts_were_split(
    trained: Trained, run: str
) -> None:
    model, cases = JOURNEYS[run]
    for case in cases:
        assert_codes(trained.ranks(case.name), 0 if case.signal is None else TERMINATED)
    folder, step, starts = trained.run(cases[0].name), 0, []
    for case in cases:
        starts.append(step)
        step += 0 if case.signal is None else case.signal[1]
    record = json.loads((folder / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == starts
    assert_near(metrics(folder), metrics(trained.run(model)), STEPS)
    assert_near_state(saved(folder, STEPS), saved(trained.run(model), STEPS))


@pytest.mark.parametrize("run", STOPPED)
def test_on_the_same_layout_a_stopped_run_ends_with_the_bits_of_one_never_stopped(
    trained: Trained, run: str
) -> None:
    for part, code in ((1, TERMINATED), (2, 0)):
        assert_codes(trained.ranks(f"{run}-{part}"), code)
    whole, again = trained.run(STOPPED[run]), trained.run(f"{run}-1")
    assert [[row[n] for n in CURVES] for row in metrics(again).values()] == [
        [row[n] for n in CURVES] for row in metrics(whole).values()
    ]
    assert checkpoint_hashes(again) == checkpoint_hashes(whole)
