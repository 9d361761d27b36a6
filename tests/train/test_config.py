"""A configuration is checked whole, and whatever is wrong is one line with a path and a remedy."""

import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nmoe_kernels.rdep import Settings
from nmoe_train.config import Config, describe_schema, load_config
from nmoe_train.config.fingerprint import fingerprint, result_fields
from nmoe_train.config.load import parse_config
from nmoe_train.errors import TrainError
from nmoe_train.presets import QUICKSTART
from pydantic import BaseModel

TOML = """
[run]
name = "from the file"
[model]
width = 32
layers = 2
heads = 2
dense_width = 48
[model.moe]
experts = 8
top_k = 2
expert_width = 16
[train]
steps = 10
seq_len = 16
batch_size = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    return path


def load(path: Path, *sets: str, **environment: str) -> Config:
    return load_config(path, sets, environment)


def failure(path: Path, *sets: str, **environment: str) -> TrainError:
    with pytest.raises(TrainError) as caught:
        load(path, *sets, **environment)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("sets", "field", "says"),
    [
        (["train.stepz=3"], "train.stepz", "did you mean train.steps?"),
        (["eval.evry=3"], "eval.evry", "did you mean eval.every?"),
        (["modle.width=3"], "modle", "no such key"),
        (["model.moe.topk=3"], "model.moe.topk", "did you mean model.moe.top_k?"),
        (["seq_len=3"], "seq_len", "did you mean train.seq_len?"),
        (["train.steps=many"], "train.steps", "integer, got 'many'"),
        (["train.steps=2.5"], "train.steps", "got 2.5"),
        (["train.steps=0"], "train.steps", "greater than 0, got 0"),
        (["run.tags=one"], "run.tags", "valid list, got 'one'"),
        (["run.name=7"], "run.name", "string, got 7"),
        (["run.device=tpu"], "run.device", "'auto', 'cpu' or 'cuda', got 'tpu'"),
        (["optimizer.betas=[0.9, 1.5]"], "optimizer.betas.1", "less than 1, got 1.5"),
        (["optimizer.lr=nan"], "optimizer.lr", "got nan"),
        (["optimizer.lr=inf"], "optimizer.lr", "got inf"),
        (["schedule.warmup=inf"], "schedule.warmup", "got inf"),
        (["optimizer.weight_decay=nan"], "optimizer.weight_decay", "got nan"),
        (["train=5"], "train", "got 5"),
        (["model.moe.top_k=9"], "model.moe.top_k", "out of 8 available; take at most 8"),
        (["model.moe.groups=3"], "model.moe.groups", "8 experts do not divide into 3 groups"),
        (["model.moe.top_groups=2"], "model.moe.top_groups", "2 groups chosen out of 1"),
        (
            ["model.moe.groups=4", "model.moe.top_k=3"],
            "model.moe.top_k",
            "out of 2 available; take at most 2",
        ),
        (["model.heads=5"], "model.width", "width 32 does not divide into 5 heads"),
        (["model.dense_layers=3"], "model.dense_layers", "take at most 2"),
        (["model.attention.qk_rope_head_dim=7"], "model.attention.qk_rope_head_dim", "7 is odd"),
        (
            ["model.attention.kind=gqa", "model.attention.head_dim=7"],
            "model.attention.head_dim",
            "make it even",
        ),
        (
            ["model.attention.kind=gqa", "model.attention.kv_heads=3"],
            "model.attention.kv_heads",
            "2 heads cannot share 3 key-value heads",
        ),
        (
            ["model.positions=8"],
            "train.seq_len",
            "16 tokens in a model of 8 positions; lower train.seq_len or raise model.positions",
        ),
        (["parallel.rdep.deadline_s=1e-4"], "parallel.rdep.deadline_s", "1"),
        (
            ["schedule.warmup=0.6", "schedule.decay=0.6"],
            "schedule.decay",
            "warm-up and decay take 768 tokens of a run of 640; lower",
        ),
        (["schedule.warmup=1000"], "schedule.decay", "of a run of 640"),
    ],
)
def test_a_bad_value_is_one_line_with_its_path_and_what_to_do(
    file: Path, sets: list[str], field: str, says: str
) -> None:
    error = failure(file, *sets)
    assert error.code == "E-CONFIG"
    assert f" {field}: " in str(error)
    assert says in str(error)
    assert str(file) in str(error)


def test_every_problem_is_reported_at_once(file: Path) -> None:
    text = str(failure(file, "train.steps=0", "model.layers=x", "data.nothing=1"))
    assert all(f" {path}: " in text for path in ("train.steps", "model.layers", "data.nothing"))


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(TOML.replace("steps = 10\n", ""))
    assert " train.steps: required, and not given" in str(failure(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.toml", tmp_path, binary):
        error = failure(path)
        assert error.code == "E-CONFIG-FILE"
        assert str(path) in str(error)


@pytest.mark.parametrize("content", [b"[train\n", b"a = \n", b"x = 1\nx = 2\n"])
def test_broken_toml_is_one_line_with_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    error = failure(path)
    assert error.code == "E-CONFIG-TOML"
    assert str(path) in str(error)


def test_set_without_an_equals_sign_says_how_to_write_it(file: Path) -> None:
    error = failure(file, "train.steps")
    assert error.code == "E-CONFIG-SET"
    assert "--set section.key=value" in str(error)


@pytest.mark.parametrize(
    ("sets", "environment", "origin"),
    [
        (["train.steps.more=3"], {}, "--set train.steps.more=3"),
        (["run.name.x.y=3"], {}, "--set run.name.x.y=3"),
        ([], {"NMOE_TRAIN__STEPS__MORE": "3"}, "environment variable NMOE_TRAIN__STEPS__MORE"),
    ],
)
def test_a_value_is_not_a_section(
    file: Path, sets: list[str], environment: dict[str, str], origin: str
) -> None:
    error = failure(file, *sets, **environment)
    assert error.code == "E-CONFIG-SET"
    assert origin in str(error)
    assert "is a value, not a section" in str(error)


def test_later_sources_win(file: Path) -> None:
    environment = {"NMOE_TRAIN__STEPS": "20", "NMOE_RUN__NAME": "from the environment"}
    assert load(file).train.steps == 10
    assert load(file, **environment).train.steps == 20
    both = load(file, "train.steps=30", **environment)
    assert both.train.steps == 30
    assert both.run.name == "from the environment"


def test_the_environment_reaches_nested_sections_and_leaves_other_names_alone(file: Path) -> None:
    environment = {
        "NMOE_MODEL__MOE__TOP_K": "3",
        "NMOE_KERNELS_BACKEND": "reference",
        "OTHER__THING": "1",
    }
    assert load(file, **environment).model.moe.top_k == 3


def test_an_unknown_name_in_the_environment_is_an_error(file: Path) -> None:
    text = str(failure(file, NMOE_TRAIN__STEPZ="3"))
    assert " train.stepz: no such key; did you mean train.steps?" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain words", "plain words"),
        ('"7"', "7"),
        ("a=b", "a=b"),
        ("", ""),
        ("x # y", "x # y"),
    ],
)
def test_text_that_is_no_toml_is_taken_as_it_is(file: Path, text: str, value: str) -> None:
    assert load(file, f"run.name={text}").run.name == value


def test_lists_and_sections_are_read_as_toml(file: Path) -> None:
    config = load(file, 'run.tags=["a", "b"]', "optimizer.betas=[0.8, 0.9]", "eval={every = 5}")
    assert config.run.tags == ["a", "b"]
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.eval.every == 5


def test_what_is_not_given_has_its_documented_default(file: Path) -> None:
    config = load(file)
    given = {"run.name", "model.width", "model.layers", "model.heads", "model.dense_width"}
    given |= {"model.moe.experts", "model.moe.top_k", "model.moe.expert_width"}
    given |= {"train.steps", "train.seq_len", "train.batch_size"}
    for path, _, default, _ in describe_schema():
        value: Any = config
        for key in path.split("."):
            value = getattr(value, key)
        if path not in given:
            assert default == ("absent" if value is None else str(value)), path


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Paths of all fields, by walking the models and not `describe_schema`."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= leaves(kind, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_the_schema_lists_every_field_with_its_meaning() -> None:
    rows = describe_schema()
    assert {path for path, *_ in rows} == leaves(Config)
    assert len(rows) == len({path for path, *_ in rows})
    for path, kind, default, meaning in rows:
        assert re.search(r"\w", kind), path
        assert default, path
        assert len(meaning) > 10, path
        assert meaning.endswith("."), path


def test_the_quickstart_is_valid_and_complete() -> None:
    config = load(QUICKSTART)
    assert config.data.text == "python-stdlib"
    assert config.model.moe.experts > config.model.moe.top_k


def test_a_loaded_configuration_cannot_be_changed(file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(file).train.steps = 3  # type: ignore[misc]  # what must fail


def test_a_configuration_written_to_run_json_reads_back_the_same(file: Path) -> None:
    config = load(file, "data.dir=/tmp/x", "run.tags=['a']")
    assert parse_config(config.model_dump(mode="json"), "run.json") == config


SAME_RESULT = [
    ("train.steps", 20),
    ("train.micro_batch_size", 2),
    ("train.loss_chunk", 7),
    ("train.recompute", "layer"),
    ("run.name", "other"),
    ("run.dir", "elsewhere"),
    ("checkpoint.every", 7),
    ("eval.every", 3),
    ("telemetry.seal_every", 5),
    ("parallel.dp", 2),
    ("parallel.ep", 2),
    ("parallel.rdep.transport", "collective"),
    ("parallel.rdep.deadline_s", 5.0),
    ("parallel.rdep.overflow", "drop"),
]
OTHER_RESULT = [
    ("run.seed", 1),
    ("model.width", 64),
    ("model.moe.top_k", 1),
    ("model.attention.kind", "gqa"),
    ("train.batch_size", 8),
    ("train.seq_len", 8),
    ("train.clip_norm", 0.5),
    ("optimizer.lr", 1.0),
    ("schedule.floor", 0.5),
    ("precision.dtype", "bf16"),
    ("parallel.rdep.capacity", 1.5),
]


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [(*change, True) for change in SAME_RESULT] + [(*change, False) for change in OTHER_RESULT],
)
def test_the_fingerprint_moves_with_what_changes_the_result_and_nothing_else(
    file: Path, path: str, value: Any, same: bool
) -> None:
    def of(config: Config) -> str:
        return fingerprint(result_fields(config, "data", {"dp": 2}))

    text = f'"{value}"' if isinstance(value, str) else value
    assert (of(load(file)) == of(load(file, f"{path}={text}"))) is same


def test_the_layout_is_part_of_the_fingerprint_where_a_rank_may_send_only_so_much(
    file: Path,
) -> None:
    def of(*sets: str, dp: int) -> str:
        return fingerprint(result_fields(load(file, *sets), "data", {"dp": dp}))

    assert of(dp=1) == of(dp=2)
    bounded = "parallel.rdep.capacity=1.5"
    assert of(bounded, dp=1) != of(bounded, dp=2)


def test_the_settings_of_rdep_are_those_of_the_kernels(file: Path) -> None:
    rdep = load(file, "parallel.rdep.capacity=2", "parallel.rdep.keep=fetch").parallel.rdep
    settings = Settings(**rdep.model_dump())
    assert (settings.capacity, settings.keep) == (2.0, "fetch")
    names = {field.name for field in dataclasses.fields(Settings)}
    assert names == {path.split(".")[2] for path, *_ in describe_schema() if ".rdep." in path}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("most", "input should be 'exact' or a valid number, got 'most'"),
        ("-1", "input should be 'exact' or greater than 0, got -1"),
    ],
)
def test_a_key_of_several_kinds_is_named_once_with_what_each_asks_for(
    file: Path, text: str, says: str
) -> None:
    found = str(failure(file, f"parallel.rdep.capacity={text}"))
    assert f": parallel.rdep.capacity: {says}; `nmoe-train" in found


def test_the_fingerprint_moves_with_the_data(file: Path) -> None:
    fields = [result_fields(load(file), data, {}) for data in ("one", "two")]
    assert fingerprint(fields[0]) != fingerprint(fields[1])


def test_parsing_leaves_the_mapping_as_it_was(tiny_tree: Callable[..., dict[str, Any]]) -> None:
    tree = tiny_tree()
    parse_config(tree, "tiny")
    assert tree == tiny_tree()


def test_every_field_of_the_quickstart_file_is_in_the_schema() -> None:
    known = {path for path, *_ in describe_schema()}
    tree = tomllib.loads(QUICKSTART.read_text())

    def paths(section: dict[str, Any], prefix: str = "") -> set[str]:
        nested = {key: value for key, value in section.items() if isinstance(value, dict)}
        found = {prefix + key for key in section.keys() - nested.keys()}
        return found.union(*(paths(value, f"{prefix}{key}.") for key, value in nested.items()))

    assert paths(tree) <= known
