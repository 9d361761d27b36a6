"""Sources: every record is a document with its origin or a rejection with its reason."""

import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from nmoe_data.errors import DataError
from nmoe_data.sources import (
    Cursor,
    Document,
    Rejection,
    list_files,
    listing_hash,
    read_documents,
    sample_texts,
)
from nmoe_data.sources import jsonl as jsonl_module

GOOD = ["first", "line\u2028separator", "café 🙂", "crlf\r\nkept"]


def read(source: object, cursor: Cursor | None = None) -> tuple[list[str], list[tuple[int, str]]]:
    """Return the texts and the (offset, reason) of rejections."""
    items = list(read_documents(list_files(source), cursor))
    texts = [item.text for item in items if isinstance(item, Document)]
    return texts, [(i.byte_offset, i.reason) for i in items if isinstance(i, Rejection)]


def encode_lines(texts: list[str], end: bytes = b"\n") -> bytes:
    return b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + end for t in texts)


BAD_LINES = {
    b'{"text": null}': "null-text",
    b'{"text": ["a"]}': "text-not-a-string",
    b'{"text": 3}': "text-not-a-string",
    b'{"other": "x"}': "missing-field",
    b"[1, 2]": "not-an-object",
    b"7": "not-an-object",
    b"{": "invalid-json",
    b'{"text": "a\x00b"}': "invalid-json",
    b'{"text": "a\\u0000b"}': "nul-byte",
    b'{"text": "\\ud800"}': "lone-surrogate",
    b'{"text": "\xff"}': "invalid-utf8",
    b'{"text": "a", "text": "b"}': "duplicate-field",
    b'{"text": "a", "n": {"text": ' + b"[" * 1005 + b"]" * 1005 + b"}}": "duplicate-field",
    b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "invalid-json",
    b'{"text": ""}': "empty",
    b'{"text": " \\n"}': "empty",
    b"": "blank-line",
    b"  ": "blank-line",
}


@pytest.mark.parametrize(
    "line", BAD_LINES, ids=lambda line: line[:30].decode(errors="replace") or "-"
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_bad_line_is_named_and_its_neighbours_are_kept(
    line: bytes, end: bytes, tmp_path: Path
) -> None:
    before = encode_lines(["before"], end)
    path = tmp_path / "a.jsonl"
    path.write_bytes(before + line + end + encode_lines(["after"], end))
    assert read(path) == (["before", "after"], [(len(before), BAD_LINES[line])])


def test_a_field_name_inside_a_value_or_a_nested_object_is_no_duplicate(tmp_path: Path) -> None:
    lines = [{"text": 'say "text" twice', "meta": {"text": "inner"}}]
    (tmp_path / "a.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert read(tmp_path / "a.jsonl") == (['say "text" twice'], [])


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
@pytest.mark.parametrize("last", [b"", b"\n"], ids=["unended", "ended"])
def test_good_lines_come_back_whole(mark: bytes, last: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(mark + encode_lines(GOOD).removesuffix(b"\n") + last)
    assert read(tmp_path / "a.jsonl") == (GOOD, [])


def test_offsets_lead_back_to_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode_lines(GOOD))
    data = path.read_bytes()
    for item in read_documents(list_files(path)):
        assert isinstance(item, Document)
        line = data[item.byte_offset :].split(b"\n", 1)[0]
        assert json.loads(line)["text"] == item.text


def test_a_line_of_30_mb_is_one_document(tmp_path: Path) -> None:
    text = "word " * 6_000_000
    (tmp_path / "a.jsonl").write_bytes(encode_lines([text, "next"]))
    assert read(tmp_path / "a.jsonl") == ([text, "next"], [])


def test_a_line_past_the_limit_is_rejected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "MAX_LINE_BYTES", 100)
    first = encode_lines(["a"])
    path = tmp_path / "a.jsonl"
    path.write_bytes(first + encode_lines(["x" * 5000]) + encode_lines(["b"]))
    assert read(path) == (["a", "b"], [(len(first), "line-too-long")])
    items = list(read_documents(list_files(path)))
    assert read(path, items[1].cursor) == (["b"], [])


def test_two_files_of_different_schema_and_null_first_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": null}\n{"text": "a", "x": [1]}\n')
    (tmp_path / "b.jsonl").write_text('{"y": 1, "text": "b"}\n')
    assert read(tmp_path)[0] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "texts", "reasons"),
    [
        ('[{"text": "a"}, 3, {"text": "b"}]', ["a", "b"], [(1, "not-an-object")]),
        ('\ufeff[{"text": "a"}]', ["a"], []),
        ('{\n "text": "pretty"\n}', ["pretty"], []),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"], []),
        ('[{"text": "a"},', [], [(0, "invalid-json")]),
        ("[]", [], [(0, "empty")]),
        ("", [], [(0, "empty")]),
    ],
)
def test_a_json_file_may_be_an_array_an_object_or_lines(
    content: str, texts: list[str], reasons: list[tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json") == (texts, reasons)


COMPRESS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("extension", COMPRESS)
def test_several_frames_are_one_stream(extension: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{extension}"
    path.write_bytes(b"".join(COMPRESS[extension](encode_lines([text])) for text in GOOD))
    assert read(path) == (GOOD, [])


@pytest.mark.parametrize("extension", COMPRESS)
@pytest.mark.parametrize("frames", [1, 2])
def test_a_cut_compressed_file_keeps_what_came_before_and_names_the_cut(
    extension: str, frames: int, tmp_path: Path, make_texts
) -> None:
    texts = make_texts(4000)
    data = COMPRESS[extension](encode_lines(texts)) * frames
    path = tmp_path / f"a.jsonl{extension}"
    path.write_bytes(data[: len(data) - len(data) // frames // 3])
    kept, reasons = read(path)
    assert len(kept) >= (frames - 1) * len(texts)
    assert kept == (texts * frames)[: len(kept)]
    assert len(kept) < frames * len(texts)
    assert [reason for _, reason in reasons] == ["truncated"]
    assert reasons[0][0] == len(encode_lines((texts * frames)[: len(kept)]))


def test_a_zstandard_file_cut_between_two_blocks_at_a_line_end_is_noticed(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    head = compressor.compress(encode_lines(["a", "b"]))
    head += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    (tmp_path / "a.jsonl.zst").write_bytes(head)
    length = len(encode_lines(["a", "b"]))
    assert read(tmp_path / "a.jsonl.zst") == (["a", "b"], [(length, "truncated")])


@pytest.mark.parametrize("extension", COMPRESS)
def test_a_damaged_compressed_file_does_not_stop_the_next_file(
    extension: str, tmp_path: Path
) -> None:
    (tmp_path / f"a.jsonl{extension}").write_bytes(b"this is not compressed at all")
    (tmp_path / "b.jsonl").write_bytes(encode_lines(["b"]))
    texts, reasons = read(tmp_path)
    assert texts == ["b"]
    assert reasons == [(0, "damaged")]


def test_parquet_rows_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    table = pa.table({"id": range(5), "text": ["a", None, "", "b\0", "c"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    expected = [(1, "null-text"), (2, "empty"), (3, "nul-byte")]
    assert read(tmp_path / "a.parquet") == (["a", "c"], expected)


def test_invalid_utf8_in_a_parquet_row_is_named(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"], pa.binary())
    column = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == (["a", "c"], [(1, "invalid-utf8")])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (pa.table({"body": ["a"]}), "missing-field"),
        (pa.table({"text": [["a"]]}), "text-not-a-string"),
        (pa.table({"text": [1]}), "text-not-a-string"),
        (pa.table({"text": pa.array([], pa.string())}), "empty"),
    ],
)
def test_a_parquet_file_without_texts_is_one_rejection(
    table: pa.Table, reason: str, tmp_path: Path
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ([], [(0, reason)])


def test_a_cut_parquet_file_is_one_rejection(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:-20])
    assert read(tmp_path / "a.parquet") == ([], [(0, "damaged")])


@pytest.mark.parametrize(
    ("data", "texts", "reasons"),
    [
        (b"x", ["x"], []),
        (b"\xef\xbb\xbfa\r\nb", ["a\r\nb"], []),
        (b"\0" * 1000, [], [(0, "nul-byte")]),
        (b"caf\xe9", [], [(0, "invalid-utf8")]),
        ("ab".encode("utf-16"), [], [(0, "nul-byte")]),
        (b"", [], [(0, "empty")]),
        (b" \n", [], [(0, "empty")]),
    ],
)
def test_a_text_file_is_one_document_or_one_rejection(
    data: bytes, texts: list[str], reasons: list[tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read(tmp_path) == (texts, reasons)


def test_a_folder_is_read_in_the_order_of_its_paths_and_nothing_is_skipped_in_silence(
    tmp_path: Path,
) -> None:
    for name in ("b.txt", "a/z.py", "a/c.md", ".git/x.txt", "image.png", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert read(tmp_path) == (
        ["a.txt", "a/c.md", "a/z.py", "b.txt"],
        [(0, "unsupported-extension")],
    )


def test_a_file_that_vanished_is_a_rejection(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    files = list_files(tmp_path)
    (tmp_path / "a.txt").unlink()
    items = list(read_documents(files))
    assert isinstance(items[0], Rejection)
    assert items[0].reason == "unreadable"
    assert isinstance(items[1], Document)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.parquet"])
def test_reading_goes_on_from_any_cursor(name: str, tmp_path: Path, make_texts) -> None:
    texts = make_texts(20)
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(encode_lines(texts)))
    (tmp_path / "b.txt").write_text("last")
    items = list(read_documents(list_files(tmp_path)))
    assert len(items) == 21
    for number, item in enumerate(items):
        assert list(read_documents(list_files(tmp_path), item.cursor)) == items[number + 1 :]


def test_the_standard_library_is_a_source_of_python_files_without_installed_packages() -> None:
    files = list_files("python-stdlib")
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)
    os_file = next(file for file in files if file.name == "os.py")
    expected = (Path(sysconfig.get_path("stdlib")) / "os.py").read_text()
    assert next(iter(read_documents([os_file]))).text == expected


@pytest.mark.parametrize(
    ("make", "code"),
    [(False, "E-SOURCE-MISSING"), (True, "E-SOURCE-EMPTY")],
    ids=["missing", "empty"],
)
def test_a_missing_or_empty_folder_is_a_clear_error(make: bool, code: str, tmp_path: Path) -> None:
    if make:
        (tmp_path / "source").mkdir()
    with pytest.raises(DataError, match=code):
        list_files(tmp_path / "source")


def test_the_listing_hash_sees_names_and_sizes(tmp_path: Path) -> None:
    hashes = set()
    for name, content in (("a.txt", "a"), ("a.txt", "ab"), ("b.txt", "ab")):
        (tmp_path / name).write_text(content)
        hashes.add(listing_hash(list_files(tmp_path)))
    assert len(hashes) == 3


def test_the_listing_hash_sees_which_source_a_file_is_in_but_not_how_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one/a.txt", "one/b.txt", "two/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("same size")
    monkeypatch.chdir(tmp_path)
    before = listing_hash(list_files(["one", "two"]))
    assert listing_hash(list_files(["./one/", str(tmp_path / "two")])) == before
    (tmp_path / "one" / "b.txt").rename(tmp_path / "two" / "b.txt")
    assert listing_hash(list_files(["one", "two"])) != before


def test_folders_below_a_source_are_left_out_when_excluded(tmp_path: Path) -> None:
    for name in ("a.txt", "run/b.txt", "run/deep/c.txt", "runner/d.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "in")

    def names(source: Path, *exclude: Path) -> list[str]:
        return [file.name for file in list_files(source, exclude)]

    assert names(tmp_path / "in", tmp_path / "in" / "run") == ["a.txt", "runner/d.txt"]
    assert names(tmp_path / "link", tmp_path / "in" / "run") == ["a.txt", "runner/d.txt"]
    assert names(tmp_path / "in" / "run", tmp_path / "in") == ["b.txt", "deep/c.txt"]
    assert names(tmp_path / "in" / "run", tmp_path / "other") == ["b.txt", "deep/c.txt"]
    with pytest.raises(DataError, match=r"E-SOURCE-EMPTY.*left out"):
        list_files(tmp_path / "in", [tmp_path / "in"])


def test_a_sample_is_deterministic_spread_and_near_its_size(
    tmp_path: Path, make_texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(400)
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03}.txt").write_text(text, newline="")
    budget = sum(len(text.encode()) for text in texts) // 4
    sample = list(sample_texts(list_files(tmp_path), budget, seed=1))
    assert sample == list(sample_texts(list_files(tmp_path), budget, seed=1))
    assert sample != list(sample_texts(list_files(tmp_path), budget, seed=2))
    monkeypatch.chdir(tmp_path)
    assert sample == list(sample_texts(list_files("."), budget, seed=1))
    assert set(sample) <= set(texts)
    assert budget <= sum(len(text.encode()) for text in sample) < budget * 1.1
    places = sorted(texts.index(text) for text in sample)
    assert places[0] < 40
    assert places[-1] > 360
    assert sorted(sample_texts(list_files(tmp_path), 10**9)) == sorted(texts)


def test_a_sample_of_one_file_reaches_past_its_head(
    tmp_path: Path, make_texts, write_jsonl
) -> None:
    texts = make_texts(800)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    sample = list(sample_texts(list_files(path), path.stat().st_size // 8))
    assert texts.index(sample[-1]) > 400
