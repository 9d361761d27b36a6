"""Checkpoints: which are whole, what they hold, and the page that shows them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from headless import EVIL, Open, figures, markup, open_page, texts, tiles, titles
from nviz.queries import checkpoints as parts
from nviz.store.checkpoints import list_checkpoints
from run_extras import name_of, write_checkpoint
from run_folder import RunFolder

__all__ = ["open_page"]


def folder_of(run: RunFolder, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:08d}"


def test_checkpoints_are_read_the_newest_first(root: Path) -> None:
    run = RunFolder(root, "a")
    for step in (100, 2000, 300):
        write_checkpoint(run, step)
    found = list_checkpoints(run.path)
    assert [(item.step, item.state) for item in found] == [
        (2000, "complete"),
        (300, "complete"),
        (100, "complete"),
    ]
    newest = found[0]
    assert newest.tokens == 4096 * 2000 and newest.layout["ep"] == 2
    on_disk = {path.name: path.stat().st_size for path in folder_of(run, 2000).iterdir()}
    assert {file.name: file.bytes for file in newest.files} == on_disk
    assert newest.bytes == sum(on_disk.values())
    assert newest.written_unix_s == pytest.approx(
        max(path.stat().st_mtime for path in folder_of(run, 2000).iterdir())
    )


def test_a_folder_without_complete_is_unfinished(root: Path) -> None:
    run = RunFolder(root, "a")
    write_checkpoint(run, 10, complete=False)
    (found,) = list_checkpoints(run.path)
    assert (found.state, found.problem) == ("unfinished", "COMPLETE is not there")
    (folder_of(run, 10) / "meta.json").unlink()
    assert list_checkpoints(run.path)[0].state == "unfinished"


def cut(folder: Path) -> None:
    (folder / name_of(1)).write_bytes(b"short")


def lose(folder: Path) -> None:
    (folder / name_of(0)).unlink()


def change(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_bytes(path.read_bytes() + b"\n")


def tear(folder: Path) -> None:
    (folder / "meta.json").write_text('{"schema')


def lose_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "rank-00001.safetensors: another size"),
        (lose, "rank-00000.safetensors: missing"),
        (change, "another checksum than COMPLETE says"),
        (tear, "no whole JSON"),
        (lose_meta, "meta.json is not there"),
    ],
)
def test_damage_is_told_and_the_page_names_it(
    root: Path, open_page: Open, damage: Callable[[Path], None], words: str
) -> None:
    run = RunFolder(root, "a")
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    assert {item.state for item in list_checkpoints(run.path)} == {"complete"}
    damage(folder_of(run, 20))
    found = list_checkpoints(run.path)
    assert [item.state for item in found] == ["damaged", "complete"]
    assert words in str(found[0].problem)
    app = open_page("checkpoints", run="a")
    assert "Damaged: step-00000020" in texts(app) and words in texts(app)
    assert tiles(app)["Newest step"] == "10"


def test_links_and_foreign_names_are_passed_over(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    write_checkpoint(run, 10)
    folder_of(run, 10).rename(tmp_path / "outside")
    folder_of(run, 10).symlink_to(tmp_path / "outside")
    (run.path / "checkpoints" / "notes").mkdir()
    (run.path / "checkpoints" / "step-00000020").write_text("a file")
    assert list_checkpoints(run.path) == []


def test_odd_meta_breaks_nothing(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    odd = {
        "files": {"x": 5, name_of(0): {"bytes": "many", "sha256": 7}},
        "tensors": {"a": [], "b": {"shape": "large", "dtype": None}, "c": {"shape": [-3, "x", 2]}},
        "layout": [],
        "tokens": "all",
        "fingerprint": 9,
    }
    write_checkpoint(run, 10, **odd)
    app = open_page("checkpoints", run="a")
    assert tiles(app)["Complete"] == "1" and "Tensors" in titles(app)


def test_parts_add_up_to_all_tensors(root: Path) -> None:
    run = RunFolder(root, "a")
    write_checkpoint(run, 10)
    (item,) = list_checkpoints(run.path)
    found = {part.name: part for part in parts.parts(item.tensors)}
    assert found["routed experts"].tensors == 4
    assert found["routed experts"].bytes == found["optimizer, exp_avg"].bytes == 4 * 8 * 16 * 4
    assert (found["router"].elements, found["embedding and output"].elements) == (4, 2048)
    assert sum(part.tensors for part in found.values()) == len(item.tensors) == 10


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.moe.experts.17.down", "routed experts"),
        ("model.layers.3.moe.experts.router.weight", "router"),
        ("model.layers.3.moe.shared.gate.weight", "shared experts"),
        ("model.layers.3.attention.kv_up.weight", "attention"),
        ("model.layers.0.mlp.down.weight", "dense layers"),
        ("model.embedding.weight", "embedding and output"),
        ("model.layers.3.ffn_norm.weight", "norms and the rest"),
        ("optimizer.exp_avg_sq.layers.3.moe.experts.17.down", "optimizer, exp_avg_sq"),
    ],
)
def test_a_tensors_part_follows_from_its_name(name: str, part: str) -> None:
    assert parts.part_of(name) == part


def test_the_page_looks_into_the_checkpoint_of_the_address(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    write_checkpoint(run, 10, ranks=1)
    write_checkpoint(run, 20, ranks=2, fingerprint="another")
    app = open_page("checkpoints", run="a")
    assert app.dataframe[0].value["note"].tolist() == ["made with other settings", ""]
    assert app.dataframe[1].value["file"].tolist()[-2:] == [name_of(0), name_of(1)]
    older = open_page(
        "checkpoints", run="a", checkpoint="step-00000010", find="EXPERTS.3 down model"
    )
    assert older.dataframe[1].value["file"].tolist()[-1] == name_of(0)
    assert older.dataframe[2].value["tensor"].tolist() == ["model.layers.1.moe.experts.3.down"]
    assert older.dataframe[2].value["numbers"].tolist() == [128]
    assert "No tensor matches" in texts(open_page("checkpoints", run="a", find="nothing"))


def test_many_tensors_are_cut_and_said(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    many = {
        f"model.layers.{at}.mlp.down": {"file": name_of(0), "shape": [2, 3], "dtype": "bfloat16"}
        for at in range(7000)
    }
    write_checkpoint(run, 10, tensors=many)
    app = open_page("checkpoints", run="a")
    assert len(app.dataframe[2].value) == 5000
    assert "7,000 of 7,000, 42k numbers, the first 5,000 shown" in texts(app)
    assert figures(app)[0]["data"][0]["x"] == [7000 * 12 / 2**10]


def test_a_tensor_in_pieces_is_one_of_several_files(root: Path) -> None:
    run = RunFolder(root, "a")
    pieces = [{"file": name_of(rank), "start": [4 * rank, 0], "shape": [4, 3]} for rank in range(2)]
    cut = {"shape": [8, 3], "dtype": "float32", "pieces": pieces}
    write_checkpoint(run, 10, tensors={"model.up": cut, "model.odd": {**cut, "pieces": [3]}})
    (item,) = list_checkpoints(run.path)
    found = {tensor.name: (tensor.file, tensor.shape) for tensor in item.tensors}
    assert found == {
        "model.up": ("rank-00000.safetensors and 1 more", (8, 3)),
        "model.odd": ("?", (8, 3)),
    }


@pytest.mark.parametrize(
    ("status", "words"), [("running", "No checkpoint yet"), ("failed", "has no checkpoint")]
)
def test_a_run_without_checkpoints_says_so(
    root: Path, open_page: Open, status: str, words: str
) -> None:
    RunFolder(root, "a", status=status)
    assert words in texts(open_page("checkpoints", run="a"))


def test_only_unfinished_ones_are_a_warning(root: Path, open_page: Open) -> None:
    write_checkpoint(RunFolder(root, "a"), 10, complete=False)
    assert "None is complete" in texts(open_page("checkpoints", run="a"))


def test_names_in_a_checkpoint_stay_text(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", name=EVIL)
    tensor = {"file": EVIL, "shape": [1], "dtype": EVIL}
    files = {EVIL: {"bytes": 1, "sha256": EVIL}}
    write_checkpoint(run, 10, tensors={EVIL: tensor}, files=files, layout={EVIL: EVIL})
    app = open_page("checkpoints", run="a")
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))
    assert "<script" not in json.dumps(figures(app))
