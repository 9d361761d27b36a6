"""Documents that command the judge: the attacks reach it, and the defence is measured."""

from pathlib import Path

import numpy as np
import pytest
from judge_server import find_document
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.documents import Document, document_id
from nmoe_data.hydra.injection import (
    ATTACKS,
    attack_of,
    attacked,
    measure_injection,
    read_pairs,
    write_pairs,
)
from nmoe_data.hydra.prompt import PromptSettings, build_prompt
from nmoe_data.hydra.session import open_session

PROMPTS = PromptSettings()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("characters", [300, 24_000])
def test_an_attack_stands_whole_in_what_the_judge_sees(
    attack: str, characters: int, documents, code_rubric
) -> None:
    settings = PromptSettings(max_characters=characters)
    sentence = ATTACKS[attack](code_rubric)
    places = set()
    for document in documents(30):
        variant = attacked(document, attack, code_rubric, settings)
        prompt = build_prompt(code_rubric, variant, settings)
        shown, _ = find_document(prompt.messages[1]["content"])
        assert shown == variant.text
        assert variant.id == document_id(variant.text) != document.id
        before, _, after = shown.partition(f"\n{sentence}\n")
        assert document.text.startswith(before + after)
        places.add(0 if not before else 2 if not after else 1)
    assert places == {0, 1, 2}


def test_the_attack_of_a_document_is_seeded_and_all_are_used(documents) -> None:
    names = [attack_of(document.id, 0) for document in documents(100)]
    assert names == [attack_of(document.id, 0) for document in documents(100)]
    assert set(names) == set(ATTACKS)
    assert names != [attack_of(document.id, 1) for document in documents(100)]


def measured(documents: list[Document], judge: JudgeSettings, rubric, folder: Path):
    import asyncio

    async def work():
        async with open_session([judge], rubric, folder / "c.sqlite") as session:
            return await measure_injection(session, documents, PROMPTS)

    return asyncio.run(work())


def mean_shift(pairs, defended: bool) -> float:
    rows = [pair for pair in pairs if pair.defended == defended]
    assert rows
    return float(np.mean([np.subtract(p.attacked_scores, p.clean_scores) for p in rows]))


def test_every_attack_moves_an_obedient_judge_and_none_a_firm_one(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    server.behaviour.obedience = 1.0
    server.behaviour.obedience_defended = 0.0
    wanted = documents(60)
    pairs = measured(wanted, judge(), code_rubric, tmp_path)
    assert len(pairs) == 120
    assert {pair.attack for pair in pairs} == set(ATTACKS)
    plain = [pair for pair in pairs if not pair.defended]
    fives = [pair for pair in plain if pair.attacked_scores == (5,) * 5]
    assert len(fives) == len(plain)
    assert mean_shift(pairs, defended=False) > 1.5
    assert abs(mean_shift(pairs, defended=True)) < 0.3


def test_the_shift_follows_the_obedience_of_the_judge(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    server.behaviour.obedience = 0.8
    server.behaviour.obedience_defended = 0.2
    pairs = measured(documents(80), judge(), code_rubric, tmp_path)
    low, high = mean_shift(pairs, defended=True), mean_shift(pairs, defended=False)
    assert 0.2 < low < high < 2.5
    assert high > 2 * low


def test_pairs_are_of_one_document_by_one_judge_and_clean_labels_are_paid_once(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    wanted = documents(10)
    pairs = measured(wanted, judge(), code_rubric, tmp_path)
    assert len(server.payments) == 40
    for pair in pairs:
        document = next(one for one in wanted if one.id == pair.document_id)
        assert pair.clean_scores == server.behaviour.rule(document.text)
        variant = attacked(document, pair.attack, code_rubric, PROMPTS)
        assert pair.attacked_scores == server.behaviour.rule(variant.text)


def test_a_pair_with_an_unscored_side_says_so_and_is_read_back(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    server.behaviour.faults = {"refused": 0.3}
    pairs = measured(documents(20), judge(), code_rubric, tmp_path)
    unscored = [pair for pair in pairs if pair.attacked_scores is None]
    assert unscored
    assert {pair.attacked_status for pair in unscored} == {"refused"}
    write_pairs(tmp_path / "injection.parquet", pairs)
    rows = read_pairs(tmp_path / "injection.parquet").to_pylist()
    assert [row["clean_scores"] for row in rows] == [
        pair.clean_scores and list(pair.clean_scores) for pair in pairs
    ]
