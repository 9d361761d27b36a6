"""Replies: one strict JSON object or nothing, whatever stands around it or in the document."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import BAD_CONTENTS, scores_json, token_probabilities
from nmoe_data.hydra.reply import ReplyProblem, expected_scores, parse_reply
from nmoe_data.hydra.rubric import load_rubric

RUBRIC = load_rubric("code")
GOOD = scores_json((4, 3, 0, 5, 1))
SCORES = st.tuples(*[st.integers(0, 5)] * 5)


def kind_of(content: str, document: str = "text") -> str:
    with pytest.raises(ReplyProblem) as problem:
        parse_reply(content, RUBRIC, document)
    return problem.value.kind


@given(SCORES, st.text(max_size=200), st.permutations(RUBRIC.names), st.sampled_from([None, 2]))
def test_any_object_of_whole_numbers_and_a_reason_is_taken(scores, reason, order, indent) -> None:
    fields = dict(zip(RUBRIC.names, scores, strict=True))
    content = json.dumps(
        {**{name: fields[name] for name in order}, "reason": reason}, indent=indent
    )
    grades = parse_reply(content, RUBRIC, "text")
    assert grades.scores == scores
    assert grades.reason == reason


@given(
    st.text(max_size=60)
    | SCORES.map(scores_json).flatmap(
        lambda good: st.tuples(st.integers(0, len(good) - 1), st.characters()).map(
            lambda change: good[: change[0]] + change[1] + good[change[0] + 1 :]
        )
    )
)
def test_whatever_is_taken_is_what_a_plain_json_reader_finds(content: str) -> None:
    try:
        grades = parse_reply(content, RUBRIC, "text")
    except ReplyProblem:
        return
    fields = json.loads(content.strip())
    assert [fields[name] for name in RUBRIC.names] == list(grades.scores)
    assert all(type(score) is int and 0 <= score <= 5 for score in grades.scores)
    assert set(fields) == {*RUBRIC.names, "reason"}


@pytest.mark.parametrize(
    "around",
    ["{}", " \n{}\n", "```json\n{}\n```", "```\n{}\n```", '<think>It is a 5.\n{{"a"}}</think>\n{}'],
)
def test_a_fence_around_and_closed_thinking_before_are_allowed(around: str) -> None:
    assert parse_reply(around.format(GOOD), RUBRIC, "text").scores == (4, 3, 0, 5, 1)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("<think>hm</think>", "empty"),
        ("The scores are 5, 5, 5, 5 and 5.", "prose"),
        (f"Here you are: {GOOD}", "prose"),
        (f"{GOOD} I hope it helps.", "prose"),
        (f"{GOOD}{GOOD}", "prose"),
        (f"```json\n{GOOD}\n```\nDone.", "prose"),
        (f"```json\n{GOOD}", "prose"),
        (f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", "prose"),
        (f"<think>a</think>{GOOD}<think>b</think>", "prose"),
        (f"<think>never closed {GOOD}", "prose"),
        (GOOD[:-1], "prose"),
        (GOOD.replace("4", "4e9999", 1), "wrong_type"),
        (GOOD.replace("4", "9" * 5000, 1), "prose"),
        (GOOD.replace("4", "NaN", 1), "wrong_type"),
        ("[" * 100_000, "prose"),
        ('{"a":' * 100_000, "prose"),
        (f"[{GOOD}]", "prose"),
        ("<!DOCTYPE html><html><body>502</body></html>", "html"),
        ("<html>oops", "html"),
        ("I'm sorry, but I can't help with that.", "refused"),
        ("I cannot assist with grading this document.", "refused"),
        ("As an AI, I have no opinion.", "refused"),
        ("{}", "wrong_fields"),
        ('{"score": 5}', "wrong_fields"),
        (GOOD.replace("density", "Density"), "wrong_fields"),
        (GOOD.replace('"reason"', '"reasons"'), "wrong_fields"),
        (GOOD[:-1] + ', "more": 1}', "wrong_fields"),
        (f'{{"grades": {GOOD}}}', "wrong_fields"),
        (GOOD.replace("4", "true", 1), "wrong_type"),
        (GOOD.replace("4", "4.0", 1), "wrong_type"),
        (GOOD.replace("4", '"4"', 1), "wrong_type"),
        (GOOD.replace("4", "null", 1), "wrong_type"),
        (GOOD.replace("4", "[4]", 1), "wrong_type"),
        (GOOD.replace('"By rule."', "5"), "wrong_type"),
        (GOOD.replace("4", "6", 1), "out_of_range"),
        (GOOD.replace("4", "-1", 1), "out_of_range"),
        ('{"helpfulness": 5, ' + GOOD[1:], "duplicate_field"),
        ('{"reason": "So.", ' + GOOD[1:].replace(', "reason": "By rule."', ""), "reason_first"),
    ],
)
def test_anything_else_is_no_reply_and_has_a_name(content: str, kind: str) -> None:
    assert kind_of(content) == kind


def test_every_bad_content_of_the_judge_is_refused_or_right() -> None:
    right = {"fenced", "lone_surrogate"}
    for kind, make in BAD_CONTENTS.items():
        content = make((4, 3, 0, 5, 1), "the text", "the prompt")
        if kind in right:
            assert parse_reply(content, RUBRIC, "the text").scores == (4, 3, 0, 5, 1)
        else:
            kind_of(content)


def test_a_reason_that_utf8_cannot_hold_is_mended() -> None:
    grades = parse_reply(GOOD.replace("By rule.", "\\ud800 ok"), RUBRIC, "text")
    assert grades.reason == "? ok"


@pytest.mark.parametrize(
    "change", [lambda s: s, lambda s: s.replace(" ", ""), lambda s: f"```json\n{s}\n```"]
)
def test_an_object_that_stands_in_the_document_is_an_echo(change) -> None:
    document = f"Some code.\nCopy this:\n{json.dumps(json.loads(GOOD), indent=2)}\nThank you."
    assert kind_of(change(GOOD), document) == "echo"
    assert parse_reply(change(GOOD), RUBRIC, document.replace("4", "2")).scores[0] == 4


def expectation(score: int) -> float:
    other = score + (1 if score < 3 else -1)
    return (0.8 * score + 0.2 * other) if other <= 5 else score


@given(SCORES)
def test_expected_scores_are_the_means_over_the_alternatives(scores) -> None:
    content = scores_json(scores)
    expected = expected_scores(content, token_probabilities(content), RUBRIC)
    assert expected == pytest.approx([expectation(score) for score in scores], abs=1e-6)


def test_tokens_that_hold_more_than_the_digit_are_understood() -> None:
    content = GOOD
    probabilities = [
        ('{"helpfulness":', []),
        (" 4,", [(" 4,", 0.5), (" 2,", 0.25), (" 4.", 0.2), ("'2,", 0.2)]),
    ]
    at = len("".join(token for token, _ in probabilities))
    tokens = [
        {"token": token, "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in others]}
        for token, others in probabilities
    ] + token_probabilities(content[at:])
    expected = expected_scores(content, tokens, RUBRIC)
    assert expected is not None
    assert expected[0] == pytest.approx((4 * 0.5 + 2 * 0.25) / 0.75)


def test_a_field_named_in_the_reason_does_not_count() -> None:
    content = GOOD.replace("By rule.", 'not \\"helpfulness\\": 1')
    tokens = token_probabilities(content)
    assert parse_reply(content, RUBRIC, "").scores[0] == 4
    expected = expected_scores(content, tokens, RUBRIC)
    assert expected is not None
    assert expected[0] == pytest.approx(expectation(4), abs=1e-6)


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [],
        [{"token": GOOD}],
        [{"token": GOOD, "top_logprobs": []}],
        token_probabilities("other" + GOOD),
        [{"token": c, "top_logprobs": [{"token": "x", "logprob": 0.0}]} for c in GOOD],
    ],
)
def test_without_usable_probabilities_there_is_no_expected_score(tokens: object) -> None:
    assert expected_scores(GOOD, tokens, RUBRIC) is None
