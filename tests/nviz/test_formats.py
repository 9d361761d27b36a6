"""How numbers, times and foreign text are written."""

import datetime
import math

import pytest
from nviz import formats
from nviz.queries.configuration import flatten, search


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0.000"),
        (2.31456, "2.315"),
        (12345.6, "12,346"),
        (0.000012, "1.200e-05"),
        (1e30, "1.000e+30"),
    ],
)
def test_values(value: float | None, text: str) -> None:
    assert formats.value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (45.9, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (273600, "3 d 4 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999"), (12345, "12.3k"), (4.56e6, "4.56M"), (math.nan, "NaN"), (None, "–")],
)
def test_short_numbers(value: float | None, text: str) -> None:
    assert formats.short(value) == text


def test_markup_in_foreign_text_is_escaped() -> None:
    text = "<b>x</b> [a](javascript:alert(1)) **b** `c` $d$ :red[e] ~f~ # g\nnew | line"
    found = formats.escaped(text)
    for sign in "<>[]()*`$:~#|":
        assert found.count(sign) == found.count("\\" + sign)
    assert "\n" not in found
    assert found.replace("\\", "") == " ".join(text.split())


def test_times_outside_the_calendar_are_none() -> None:
    assert formats.moment(0) == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    for odd in (None, math.nan, math.inf, 1e300, -1e300):
        assert formats.moment(odd) is None


def test_tables_bear_equal_names_mixed_types_and_large_integers() -> None:
    found = formats.table(["a", "a", "a", "b"], [(1, "x", None, 2**80), (2, 3.5, None, 1)])
    assert found.column_names == ["a", "a (2)", "a (3)", "b"]
    assert found["a (2)"].to_pylist() == ["x", "3.5"]
    assert found["b"].to_pylist() == [str(2**80), "1"]
    assert formats.table(["a"], []).num_rows == 0


def test_a_configuration_is_flattened_and_searched() -> None:
    config = {"b": {"c": 1, "d": {"e": "Text"}, "empty": {}}, "a": [1, {"x": 2}], "n": None}
    rows = flatten(config)
    assert rows == [
        ("a", '[1, {"x": 2}]'),
        ("b.c", "1"),
        ("b.d.e", "Text"),
        ("b.empty", "{}"),
        ("n", "null"),
    ]
    assert search(rows, "TEXT e") == [("b.d.e", "Text")]
    assert search(rows, "") == rows
    assert flatten({}) == []


def test_a_name_cannot_turn_the_text_around_it_or_break_its_line() -> None:
    turned = "a\u202eb\u2066c\x00d\x1be\nf"
    for found in (formats.escaped(turned), formats.chart_text(turned)):
        assert found == "a\ufffdb\ufffdc\ufffdd\ufffde f"
    assert formats.chart_text("שלום 日本 👨\u200d👩") == "שלום 日本 👨\u200d👩"


def test_a_long_name_keeps_its_ends_and_quotes_stay_quotes_in_a_chart() -> None:
    assert formats.shortened("abcdefghij", 10) == "abcdefghij"
    assert formats.shortened("abcdefghijk", 10) == "abcde…hijk"
    for most in range(3, 12):
        assert len(formats.shortened("abcdefghijklmnop", most)) == most
    assert formats.chart_text('<b> & "it\'s"') == '&lt;b&gt; &amp; "it\'s"'
    assert formats.chart_text("<" * 99, 9) == "&lt;" * 4 + "…" + "&lt;" * 4
