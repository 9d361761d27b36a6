"""Fixtures of the end-to-end tests."""

import pytest
from commands import nmoe_train, text_folder
from layout_cases import POOLS, Trained, cases_of
from layout_runs import Results, make_shards, run_cases

__all__ = ["nmoe_train", "text_folder", "trained"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All layouts of `layout_cases`; a pool of them is trained when one is asked for."""
    shards = make_shards(tmp_path_factory.mktemp("shards"))

    def train(pool: str) -> Results:
        processes, models = POOLS[pool]
        return run_cases(tmp_path_factory.mktemp(pool), shards, cases_of(models), processes)

    return Trained(train)
