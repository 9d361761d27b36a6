"""Rubrics: the bundled ones, the hash of their meaning, and what is refused."""

import re
import tomllib
from pathlib import Path

import pytest
from nmoe_data.errors import DataError
from nmoe_data.hydra.rubric import load_rubric, parse_rubric

NAMES = ("helpfulness", "correctness", "coherence", "complexity", "density")
ANCHORS = '["a", "b", "c", "d", "e", "f"]'
ONE = f"""
name = "mine"
instructions = "Grade it."
[[dimensions]]
name = "wit"
description = "How witty it is."
anchors = {ANCHORS}
"""


@pytest.mark.parametrize("name", ["prose", "code"])
def test_a_bundled_rubric_has_the_five_dimensions_with_six_anchors(name: str) -> None:
    rubric = load_rubric(name)
    content = tomllib.loads(rubric.toml.decode())
    assert rubric.names == NAMES
    assert [list(d.anchors) for d in rubric.dimensions] == [
        entry["anchors"] for entry in content["dimensions"]
    ]
    assert all(len(set(d.anchors)) == 6 for d in rubric.dimensions)


def test_the_bundled_rubrics_ask_different_things() -> None:
    assert load_rubric("prose").hash != load_rubric("code").hash


def test_the_hash_is_of_the_meaning_and_not_of_the_layout() -> None:
    plain = parse_rubric(ONE.encode(), "x")
    commented = parse_rubric(f"# a comment\n{ONE}\n\n".replace(" = ", "=").encode(), "y")
    assert plain.hash == commented.hash
    assert plain.toml != commented.toml


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mine", "yours"),
        ("Grade it", "Score it"),
        ("wit", "humour"),
        ("witty", "dull"),
        ('"f"', '"g"'),
    ],
)
def test_the_hash_changes_with_every_part_of_the_meaning(old: str, new: str) -> None:
    assert (
        parse_rubric(ONE.encode(), "x").hash
        != parse_rubric(ONE.replace(old, new).encode(), "x").hash
    )


@pytest.mark.parametrize("count", [1, 16])
def test_an_own_rubric_may_have_1_to_16_dimensions(count: int, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    head, one = ONE.split("[[dimensions]]")
    path.write_text(
        head + "".join("[[dimensions]]" + one.replace("wit", f"d{n}", 1) for n in range(count))
    )
    assert load_rubric(path).names == tuple(f"d{n}" for n in range(count))


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ("name = ", "is no TOML"),
        (ONE.replace('name = "mine"', ""), "has no 'name'"),
        (ONE.replace("instructions", "instruction"), "has no 'instructions'"),
        ("colour = 1\n" + ONE, "unknown 'colour'"),
        (ONE.replace("[[dimensions]]", "[dimensions]"), "needs 1 to 16"),
        (ONE.split("[[")[0] + "dimensions = []", "needs 1 to 16"),
        (ONE + ONE[ONE.index("[[") :], "names a dimension twice"),
        (ONE.replace(', "f"]', "]"), "needs 6 anchors"),
        (ONE.replace('"f"', "5"), "needs 6 anchors"),
        (ONE.replace('"f"', '" "'), "needs 6 anchors"),
        (ONE.replace('"wit"', '"Wit and humour"'), "names a dimension 'Wit and humour'"),
        (ONE.replace('"wit"', '"reason"'), "names a dimension 'reason'"),
        (ONE.replace('"Grade it."', '""'), "needs text for 'instructions'"),
        (ONE.split("[[")[0] + "dimensions = [1]", "no table"),
        (
            ONE.split("[[")[0]
            + "".join(ONE[ONE.index("[[") :].replace("wit", f"d{n}", 1) for n in range(17)),
            "needs 1 to 16",
        ),
    ],
)
def test_a_file_that_is_no_rubric_is_one_clear_line(toml: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(DataError, match=re.escape(what)) as error:
        load_rubric(path)
    assert error.value.code == "E-HYDRA-RUBRIC"
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="E-HYDRA-RUBRIC: there is no rubric"):
        load_rubric(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(DataError, match=r"E-HYDRA-RUBRIC: .*is no TOML"):
        load_rubric(tmp_path / "latin.toml")
