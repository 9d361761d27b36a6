"""`nmoe-data hydra label` as a user starts it: its folder, its stops, its errors."""

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from judge_server import JudgeServer, hidden_scores
from nmoe_data.errors import DataError
from nmoe_data.hydra.documents import split_of
from nmoe_data.hydra.injection import PAIRS_SCHEMA
from nmoe_data.hydra.labels import DOCUMENTS_SCHEMA, LABELS_SCHEMA, read_labels
from nmoe_data.hydra.rubric import load_rubric

LINE = re.compile(r"error E-[A-Z-]+: [^\n]+; [^\n]+\n")


@pytest.fixture
def label(server: JudgeServer, tmp_path: Path, run_cli) -> Callable[..., object]:
    """Run `hydra label SOURCE --out tmp/labels` with one judge at the server."""

    def run(source: object, *options: object, judge: bool = True):
        asked = ("--model", "m", "--base-url", server.base_url, "--no-key") if judge else ()
        out = ("--out", tmp_path / "labels", "--rubric", "code")
        return run_cli("hydra", "label", source, *out, *asked, *options)

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "labels"


def test_the_folder_holds_what_training_needs(label, pieces_file, out: Path) -> None:
    done = label(pieces_file(150), "--sample", 100, "--price-in", 1, "--price-out", 2)
    assert (done.code, done.err) == (0, "")
    assert "m: scored 100" in done.out
    assert sorted(path.name for path in out.iterdir()) == [
        "documents.parquet",
        "label.json",
        "labels.parquet",
        "requests.sqlite",
        "rubric.toml",
        "sample.json",
    ]
    assert (out / "rubric.toml").read_bytes() == load_rubric("code").toml
    assert pq.read_schema(out / "documents.parquet").equals(DOCUMENTS_SCHEMA)
    assert pq.read_schema(out / "labels.parquet").equals(LABELS_SCHEMA)
    labels = read_labels(out)
    scored = labels.scores()
    assert scored.scores.shape == (100, 5)
    assert scored.scores.tolist() == [list(hidden_scores(text)) for text in scored.texts]
    assert scored.splits == [split_of(id) for id in scored.ids]
    assert scored.weights.tolist() == [1.5] * 100
    sample = json.loads((out / "sample.json").read_text())
    assert sample["strata"] == {"pieces/512-2047": {"seen": 150, "sampled": 100}}
    summary = json.loads((out / "label.json").read_text())
    assert (summary["state"], summary["stopped_by"]) == ("finished", None)
    assert summary["counts"]["m"]["status"] == {"scored": 100}
    usage = summary["usage"]
    cost = (usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6
    assert usage["cost"] == pytest.approx(cost)
    assert labels.labels["cost"].to_numpy().sum() == pytest.approx(cost)


def test_a_second_start_asks_nothing_and_leaves_the_labels_as_they_are(
    server, label, pieces_file, out: Path
) -> None:
    server.behaviour.faults = {"refused": 0.1, "prose": 0.1}
    source = pieces_file(60)
    label(source)
    before = (out / "labels.parquet").read_bytes()
    sent = len(server.requests)
    assert label(source).code == 0
    assert (out / "labels.parquet").read_bytes() == before
    assert len(server.requests) == sent


def test_failed_documents_are_asked_again_at_the_next_start(
    server, label, pieces_file, out: Path
) -> None:
    server.behaviour.faults = {"bad_request": 0.2}
    source = pieces_file(50)
    label(source)
    statuses = Counter(read_labels(out).labels["status"].to_pylist())
    assert statuses["failed"] > 0
    server.behaviour.faults = {}
    label(source)
    assert Counter(read_labels(out).labels["status"].to_pylist()) == {"scored": 50}
    assert len(server.payments) == 50


def test_unscored_documents_are_left_out_and_never_low(server, label, pieces_file, out) -> None:
    server.behaviour.faults = {"refused": 0.2, "prose": 0.2, "bad_request": 0.2}
    label(pieces_file(80))
    labels = read_labels(out)
    rows = labels.labels.to_pylist()
    assert all((row["scores"] is None) == (row["status"] != "scored") for row in rows)
    unscored = {row["document_id"] for row in rows if row["status"] != "scored"}
    scored = labels.scores()
    assert len(unscored) > 20
    assert len(scored.ids) + len(unscored) == 80
    assert not unscored & set(scored.ids)


def test_several_judges_grade_the_same_sample_and_are_averaged(
    server, label, pieces_file, out: Path
) -> None:
    server.behaviour.noise = 0.5
    source = pieces_file(40)
    both = (f"--judge=one=m@{server.base_url}", f"--judge=two=n@{server.base_url}", "--no-key")
    assert label(source, *both, judge=False).code == 0
    labels = read_labels(out)
    assert labels.models == ["m", "n"]
    m, n = labels.scores("m"), labels.scores("n")
    assert m.ids == n.ids == labels.scores().ids
    assert (m.scores != n.scores).any()
    assert np.allclose(labels.scores().scores, (m.scores + n.scores) / 2)
    summary = json.loads((out / "label.json").read_text())
    assert [judge["name"] for judge in summary["judges"]] == ["one", "two"]
    with pytest.raises(DataError, match=r"E-HYDRA-LABELS: .*no labels of x \(there are m, n\)"):
        labels.scores("x")


def test_a_judge_added_later_keeps_the_labels_of_the_first(
    server, label, pieces_file, out: Path
) -> None:
    source = pieces_file(20)
    label(source)
    first = read_labels(out).labels
    later = ("--model", "n", "--base-url", server.base_url, "--no-key")
    assert label(source, *later, judge=False).code == 0
    labels = read_labels(out)
    assert labels.models == ["m", "n"]
    kept = labels.labels.filter([model == "m" for model in labels.labels["model"].to_pylist()])
    assert kept.equals(first)
    assert {judge["model"] for judge in labels.summary["judges"]} == {"m", "n"}


def test_expected_scores_take_the_place_of_the_integers(server, label, pieces_file, out) -> None:
    label(pieces_file(20), "--logprobs")
    scored = read_labels(out).scores()
    rule = np.array([hidden_scores(text) for text in scored.texts])
    assert np.allclose(scored.scores, rule + np.where(rule < 3, 0.2, -0.2), atol=1e-5)


def test_an_own_rubric_is_asked_and_kept(server, label, pieces_file, out, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_bytes(load_rubric("code").toml.replace(b'name = "code"', b'name = "own"'))
    assert label(pieces_file(5), "--rubric", own).code == 0
    assert (out / "rubric.toml").read_bytes() == own.read_bytes()
    assert read_labels(out).rubric.name == "own"


def test_the_injection_pairs_are_written(server, label, pieces_file, out: Path) -> None:
    server.behaviour.obedience = 1.0
    assert label(pieces_file(30), "--injection", 12).code == 0
    pairs = pq.read_table(out / "injection.parquet")
    assert pairs.schema.equals(PAIRS_SCHEMA)
    assert pairs.num_rows == 24
    assert Counter(pairs["defended"].to_pylist()) == {True: 12, False: 12}
    assert read_labels(out).labels.num_rows == 30


def test_the_pairs_of_a_judge_stay_when_another_is_added_or_a_run_stops_early(
    server, label, pieces_file, out: Path
) -> None:
    def pairs() -> list[dict]:
        rows = pq.read_table(out / "injection.parquet").to_pylist()
        return sorted(rows, key=lambda row: (row["model"], row["document_id"], row["defended"]))

    source = pieces_file(30)
    label(source, "--injection", 6)
    first = pairs()
    later = ("--model", "n", "--base-url", server.base_url, "--no-key", "--injection", 6)
    assert label(source, *later, judge=False).code == 0
    assert len(pairs()) == 24
    assert [row for row in pairs() if row["model"] == "m"] == first
    # Another prompt is asked anew; nothing is paid, so no pair takes the place of another.
    before = pairs()
    server.behaviour.quota = 0
    assert label(source, "--injection", 6, "--max-characters", 700).code == 2
    assert pairs() == before
    # Stopped when the six with the defence are there: those replace, the others stay.
    server.behaviour.quota = len(server.payments) + 30 + 6
    assert label(source, "--injection", 6, "--max-characters", 700).code == 2
    keys = {(row["document_id"], row["model"], row["defended"]) for row in pairs()}
    assert len(pairs()) == len(keys) == 24
    assert [row for row in pairs() if row["model"] == "n" or not row["defended"]] == [
        row for row in before if row["model"] == "n" or not row["defended"]
    ]
    assert pairs() != before
    # A finished run with fewer documents leaves none of its judge that it did not measure.
    server.behaviour.quota = 1000
    assert label(source, "--injection", 2, "--max-characters", 700).code == 0
    assert Counter(row["model"] for row in pairs()) == {"m": 4, "n": 12}


def test_batches_give_the_same_labels_as_the_live_run(
    server, label, pieces_file, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_data.hydra import batches

    monkeypatch.setattr(batches.fill_from_batches, "__defaults__", (None, 0.05))
    assert label(pieces_file(30), "--batch").code == 0
    assert len(server.batches) == 1
    assert len(server.requests) == len(server.payments) == 30
    scored = read_labels(out).scores()
    assert scored.scores.tolist() == [list(hidden_scores(text)) for text in scored.texts]


def test_a_budget_stops_the_run_and_a_larger_one_goes_on(
    server, label, pieces_file, out: Path
) -> None:
    source = pieces_file(120)
    done = label(source, "--max-tokens", 40_000)
    assert done.code == 0
    assert "stopped by --max-tokens" in done.err
    summary = json.loads((out / "label.json").read_text())
    assert (summary["state"], summary["stopped_by"]) == ("unfinished", "max-tokens")
    some = read_labels(out).labels.num_rows
    assert 0 < some < 120
    assert label(source, "--max-tokens", 1_000_000).err == ""
    assert read_labels(out).labels.num_rows == 120
    assert len(server.payments) == 120


def test_a_spent_quota_is_one_line_after_everything_paid_was_written(
    server, label, pieces_file, out: Path
) -> None:
    server.behaviour.quota = 30
    source = pieces_file(80)
    done = label(source)
    assert done.code == 2
    assert LINE.fullmatch(done.err)
    assert done.err.startswith("error E-HYDRA-QUOTA")
    assert read_labels(out).labels.num_rows == 30
    # A start that is refused at once does not lose them.
    server.behaviour.quota = 0
    label(source)
    assert read_labels(out).labels.num_rows == 30
    server.behaviour.quota = 1000
    assert label(source).code == 0
    assert len(server.payments) == 80


def test_a_run_in_which_nothing_is_scored_is_one_line_that_names_the_classes(
    server, label, pieces_file, out: Path
) -> None:
    server.behaviour.faults = {"refused": 1.0}
    done = label(pieces_file(10))
    assert done.code == 2
    assert done.err.startswith(
        "error E-HYDRA-NO-LABELS: none of 10 documents was scored (refused 10)"
    )
    assert read_labels(out).labels.num_rows == 10


def test_a_small_sample_without_any_reply_is_told_in_the_servers_words(
    server, label, pieces_file
) -> None:
    server.behaviour.schema = False
    done = label(pieces_file(3))
    assert done.code == 2
    assert done.err.startswith("error E-HYDRA-NO-REPLY")
    assert "response_format json_schema is not supported" in done.err


def test_a_missing_key_is_told_before_the_sources_are_read(label, pieces_file, out: Path) -> None:
    done = label(pieces_file(3), "--model", "m", "--api-key-env", "NO_SUCH_VARIABLE", judge=False)
    assert done.err.startswith("error E-HYDRA-KEY")
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), "E-ARGUMENT: no judge"),
        (("--model", "m", "--judge", "a=b"), "E-ARGUMENT: no judge, or two"),
        (("--judge", "m"), "E-ARGUMENT: --judge m=..."),
        (("--judge", "=m"), "E-ARGUMENT: --judge =..."),
        (("--judge", "a=m", "--judge", "a=n"), "E-ARGUMENT: --judge a=..."),
        (
            ("--judge", "a=m", "--judge", "b=m", "--no-key"),
            "E-ARGUMENT: the judges' models are m, m",
        ),
        (("--model", "m", "--base-url", "nowhere", "--no-key"), "E-ARGUMENT: the base URL"),
        (("--model", "m", "--api-key-env", "NO_SUCH_VARIABLE"), "E-HYDRA-KEY"),
        (("--model", "m", "--api-key-env", "x=VARIABLE"), "E-ARGUMENT: --api-key-env x=..."),
        (("--model", "m", "--price", "m=1", "--no-key"), "E-ARGUMENT: --price 1"),
        (("--model", "m", "--price", "m=-1/2", "--no-key"), "E-ARGUMENT: the prices"),
        (("--model", "m", "--max-cost", "5", "--no-key"), "E-ARGUMENT: a cost limit needs prices"),
        (("--model", "m", "--max-tokens", "0", "--no-key"), "E-ARGUMENT: max-tokens is 0"),
        (("--model", "m", "--sample", "0", "--no-key"), "E-ARGUMENT: the sample size is 0"),
        (("--model", "m", "--injection", "-1", "--no-key"), "E-ARGUMENT: injection is -1"),
        (("--model", "m", "--rubric", "none.toml", "--no-key"), "E-HYDRA-RUBRIC"),
        (("--model", "m", "--text-field", "body", "--no-key"), "E-NO-TEXT"),
    ],
)
def test_a_wrong_option_is_one_line(options, code: str, label, pieces_file) -> None:
    done = label(pieces_file(3), *options, judge=False)
    assert done.code == 2
    assert done.err.startswith(f"error {code}")
    assert LINE.fullmatch(done.err)


def test_other_arguments_for_a_folder_are_refused_and_name_what_differs(
    label, pieces_file, out: Path
) -> None:
    source = pieces_file(20)
    label(source, "--sample", 10)
    for options, what in (
        (("--sample", 12), "sample 10 became 12"),
        (("--sample", 10, "--seed", 3), "seed 0 became 3"),
        (("--sample", 10, "--rubric", "prose"), "rubric"),
    ):
        done = label(source, *options)
        assert done.code == 2
        assert done.err.startswith("error E-OUT-DIFFERS")
        assert what in done.err
    with source.open("a") as file:
        file.write('{"text": "more"}\n')
    assert label(source, "--sample", 10).err.startswith("error E-SOURCE-CHANGED")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.parquet", b"no parquet"),
        ("documents.parquet", b""),
        ("sample.json", b"{}"),
        ("label.json", b"[1"),
        ("rubric.toml", b"name = 1"),
    ],
)
def test_a_damaged_labels_folder_is_one_line(name, content, label, pieces_file, out: Path) -> None:
    label(pieces_file(5))
    (out / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_labels(out)
    assert error.value.code in ("E-HYDRA-LABELS", "E-HYDRA-RUBRIC")
    assert "\n" not in str(error.value)


def test_labels_that_do_not_fit_their_rubric_or_documents_are_refused(
    label, pieces_file, out: Path
) -> None:
    label(pieces_file(5))
    good = pq.read_table(out / "labels.parquet")
    rows = good.to_pylist()
    for change in (
        {"scores": [1, 2, 3, 4]},
        {"scores": [1, 2, 3, 4, 6]},
        {"scores": None},
        {"status": "fine"},
        {"status": "refused"},
        {"document_id": "x"},
        {"rubric_hash": "x"},
    ):
        pq.write_table(
            type(good).from_pylist([{**rows[0], **change}], LABELS_SCHEMA), out / "labels.parquet"
        )
        with pytest.raises(DataError, match="E-HYDRA-LABELS"):
            read_labels(out)
    pq.write_table(good.drop(["cost"]), out / "labels.parquet")
    with pytest.raises(DataError, match="E-HYDRA-LABELS"):
        read_labels(out)


def test_ctrl_c_lets_what_is_under_way_come_in_and_a_new_start_goes_on(
    server, start_label, until, pieces_file, out: Path
) -> None:
    server.behaviour.latency_s = 0.2
    source = pieces_file(200)
    run = start_label(source, out)
    until(lambda: len(server.payments) > 20)
    run.send_signal(signal.SIGINT)
    printed, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    some = read_labels(out).labels.num_rows
    # Nothing that was answered is lost.
    assert 20 < some == len(server.payments) < 200
    assert "labelled" in printed
    server.behaviour.latency_s = 0.0
    assert start_label(source, out).wait(60) == 0
    assert read_labels(out).labels.num_rows == len(server.payments) == 200
    assert len(server.requests) == 200


def test_a_second_ctrl_c_ends_the_run_at_once(
    server, start_label, until, pieces_file, out: Path
) -> None:
    server.behaviour.faults = {"timeout": 1.0}
    run = start_label(pieces_file(50), out)
    until(lambda: server.open > 0 or len(server.requests) > 0)
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    started = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    # Far less than the time-out of the requests under way.
    assert time.monotonic() - started < 20.0
    assert "Traceback" not in errors


def test_a_folder_in_use_is_refused(server, start_label, until, pieces_file, out: Path) -> None:
    server.behaviour.latency_s = 3.0
    source = pieces_file(100)
    first = start_label(source, out)
    until(lambda: len(server.requests) > 0)
    second = start_label(source, out)
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 2
    assert errors.startswith("error E-OUT-BUSY")
    first.send_signal(signal.SIGINT)
    first.wait(120)


def test_without_the_extra_the_command_says_how_to_get_it(pieces_file, out: Path) -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from nmoe_data.cli import main\n"
        f"sys.argv = ['x', 'hydra', 'label', {str(pieces_file(3))!r}, '--out', {str(out)!r},"
        " '--model', 'm']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error E-HYDRA-EXTRA")
    assert 'pip install "nmoe-data[hydra]"' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
