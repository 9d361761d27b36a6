"""What an elastic run refuses before it starts a worker."""

from pathlib import Path

import pytest
from nmoe_train.config import Config
from nmoe_train.elastic_run import run_elastic
from nmoe_train.errors import TrainError


def config(tmp_path: Path, **rdep: object) -> Config:
    moe = {"experts": 4, "top_k": 2, "expert_width": 4}
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "device": "cpu"},
            "model": {"width": 8, "layers": 2, "heads": 2, "dense_width": 8, "moe": moe},
            "train": {"steps": 1, "seq_len": 8, "batch_size": 4},
            "parallel": {"ep": 2, "rdep": rdep},
        }
    )


@pytest.mark.parametrize(
    ("rdep", "remedy"),
    [
        ({"capacity": 1.5}, 'set it to "exact"'),
        ({"transport": "p2p"}, 'set parallel.rdep.transport to "collective"'),
        ({"transport": "nvshmem"}, 'set parallel.rdep.transport to "collective"'),
    ],
)
def test_what_does_not_survive_a_death_is_refused(tmp_path, rdep, remedy):
    with pytest.raises(TrainError) as error:
        run_elastic(config(tmp_path, **rdep), 2, 2, None)
    assert error.value.code == "E-ELASTIC"
    assert str(error.value).endswith(remedy)
    assert not (tmp_path / "run").exists()


def test_fewer_workers_expected_than_started_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="--expected 1 is fewer than the --workers 2") as error:
        run_elastic(config(tmp_path), 2, 1, None)
    assert error.value.code == "E-ELASTIC"
