"""Chunks cover every record exactly once, whoever reads them, in whatever order."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import nmoe_data.hydra.filter.plan as plan
import nmoe_data.hydra.filter.schedule as schedule
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from nmoe_data.hydra.filter.plan import Chunk, chunk_at, plan_units
from nmoe_data.hydra.filter.reading import ChunkReader
from nmoe_data.hydra.filter.schedule import Schedule
from nmoe_data.hydra.filter.work import Done
from nmoe_data.sources import Document, Record, SourceFile, list_files, read_documents

Seen = tuple[int, int, str]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(plan, "UNIT_FILES", 3)
    monkeypatch.setattr(plan, "PARQUET_ROWS", 7)


def lines(draw: random.Random, count: int) -> bytes:
    """JSON lines with blank, bad and long ones among them."""
    made = []
    for number in range(count):
        kind = draw.random()
        if kind < 0.05:
            made.append(b"\n")
        elif kind < 0.1:
            made.append(b"{bad\n")
        elif kind < 0.13:
            made.append(json.dumps({"text": f"{number} " + "x" * 9000}).encode() + b"\n")
        else:
            words = "word " * draw.randint(1, 60)
            made.append(json.dumps({"text": f"{number} {words}"}).encode() + b"\n")
    return b"".join(made)


@pytest.fixture
def files(tmp_path: Path) -> list[SourceFile]:
    """Every kind of source file, large and small, whole and damaged."""
    draw = random.Random(1)
    (tmp_path / "a.jsonl").write_bytes(lines(draw, 200))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(draw, 200)))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines(draw, 200)))
    cut = zstandard.compress(lines(draw, 200))
    (tmp_path / "d.jsonl.zst").write_bytes(cut[: len(cut) * 2 // 3])
    for number in range(8):
        (tmp_path / f"e{number}.txt").write_text("hello " * draw.randint(0, 200))
    (tmp_path / "f.jsonl").write_bytes(lines(draw, 100)[:-1])
    rows = [f"{n} " + "w " * draw.randint(0, 200) if n % 9 else None for n in range(200)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "g.parquet", row_group_size=40)
    (tmp_path / "h.json").write_text(json.dumps([{"text": f"element {n}"} for n in range(20)]))
    long = json.dumps({"text": "y" * 30_000}).encode() + b"\n"
    (tmp_path / "i.jsonl").write_bytes(long + lines(draw, 30))
    (tmp_path / "j.jsonl").write_bytes(b"")
    (tmp_path / "k.bin").write_bytes(b"\0")
    (tmp_path / "l.parquet").write_bytes(b"no parquet at all")
    return list_files(str(tmp_path))


def seen(number: int, record: Record) -> Seen:
    return number, record.position, record.text or record.reason


def straight(files: list[SourceFile]) -> list[Seen]:
    """What one reader of the sources finds, with no chunks at all."""
    return [
        (
            item.source_index,
            item.byte_offset,
            item.text if isinstance(item, Document) else item.reason,
        )
        for item in read_documents(files)
    ]


def run_schedule(
    files: list[SourceFile], readers: int, draw: random.Random, begin: int = 0
) -> tuple[list[Seen], list[tuple[int, int, int]]]:
    """Do chunks as workers would, back in random order; what came in order, and each frontier."""
    chunks = Schedule(plan_units(files), 0, 0, 0, readers)
    workers = [ChunkReader(files, "text") for _ in range(readers)]
    out: list[tuple[Done, list[Seen]]] = []
    found: dict[str, list[Seen]] = {}
    ordered: list[Seen] = []
    places = []
    while not chunks.finished:
        while len(out) < 6 and (chunk := chunks.hand_out()) is not None:
            reader = draw.choice(workers)
            known = chunks.known_start(chunk)
            rows = [seen(number, item) for number, item in reader.read(chunk, known)]
            out.append((Done(chunk, reader.position, reader.consumed, 0, 0, 0), rows))
        done, rows = out.pop(draw.randrange(len(out)))
        found[done.chunk.name] = rows
        chunks.came_back(done)
        while (ready := chunks.advance()) is not None:
            ordered += found.pop(ready.chunk.name)
            places.append(chunks.place)
        assert all(not found.pop(done.chunk.name) for done in chunks.past_the_end())
    return ordered, places


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_chunks_in_order_are_the_records_in_order(files: list[SourceFile], readers: int) -> None:
    expected = straight(files)
    assert len(expected) > 900
    for seed in range(5):
        assert run_schedule(files, readers, random.Random(seed))[0] == expected


def test_a_schedule_goes_on_from_any_place(files: list[SourceFile]) -> None:
    expected, places = run_schedule(files, 2, random.Random(0))
    for place in places[:: len(places) // 20]:
        chunks = Schedule(plan_units(files), *place, workers=2)
        reader = ChunkReader(files, "text")
        rest: list[Seen] = []
        while not chunks.finished:
            chunk = chunks.hand_out()
            assert chunk is not None
            rest += [seen(*item) for item in reader.read(chunk, chunks.known_start(chunk))]
            chunks.came_back(Done(chunk, reader.position, 0, 0, 0, 0))
            chunks.advance()
        assert rest == expected[len(expected) - len(rest) :]
        assert rest or place == places[-1]


def test_large_files_are_cut_and_small_ones_joined(files: list[SourceFile]) -> None:
    units = {files[unit.first].name: unit for unit in plan_units(files)}
    assert units["a.jsonl"].chunks == -(-units["a.jsonl"].size // 2000) > 20
    assert units["b.jsonl.gz"].chunks is None
    assert units["g.parquet"].chunks is not None and units["g.parquet"].chunks > 10
    assert units["h.json"].chunks == 1
    joined = [unit for unit in plan_units(files) if unit.last - unit.first > 1]
    assert joined and all(unit.last - unit.first <= 3 for unit in joined)
    covered = [n for unit in plan_units(files) for n in range(unit.first, unit.last)]
    assert covered == list(range(len(files)))


def test_a_line_over_many_chunks_is_read_in_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "z" * 50_000}).encode() + b"\n" + b'{"text": "b"}\n')
    files = list_files(str(path))
    reader = ChunkReader(files, "text")
    (unit,) = plan_units(files)
    assert unit.chunks is not None and unit.chunks > 20
    counts = [len(list(reader.read(chunk_at(unit, index)))) for index in range(unit.chunks)]
    assert counts == [1] + [0] * (unit.chunks - 2) + [1]


def test_damage_passed_over_hides_no_later_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"{n} " + random.Random(n).randbytes(200).hex() for n in range(200)]
    table = pa.table({"text": rows})
    pq.write_table(table, path, row_group_size=40, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    # In the second of five row groups.
    data[len(data) * 3 // 10 : len(data) * 3 // 10 + 200] = bytes(200)
    path.write_bytes(data)
    files = list_files(str(path))
    (unit,) = plan_units(files)
    assert unit.chunks is not None

    def read(order: list[Chunk], reader: Callable[[], ChunkReader]) -> dict[str, list[Seen]]:
        return {chunk.name: [seen(*item) for item in reader().read(chunk)] for chunk in order}

    chunks = [chunk_at(unit, index) for index in range(unit.chunks)]
    alone = read(chunks, lambda: ChunkReader(files, "text"))
    assert any(row[2] == "damaged" for rows in alone.values() for row in rows)
    assert alone[chunks[-1].name][-1][2] == rows[-1]
    shared = ChunkReader(files, "text")
    assert read(chunks[::3], lambda: shared).items() <= alone.items()


def test_many_compressed_files_do_not_fill_the_schedule_with_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "AHEAD", 12)
    line = json.dumps({"text": "word " * 100}).encode() + b"\n"
    for number in range(40):
        data = zstandard.ZstdCompressor(level=1).compress(line * 3 + bytes(f"{number}\n", "ascii"))
        # Some that cannot be told to be short by their size.
        padding = b"\x50\x2a\x4d\x18" + (600).to_bytes(4, "little") + bytes(600)
        (tmp_path / f"{number:02d}.jsonl.zst").write_bytes(data + padding)
    files = list_files(str(tmp_path))
    assert {unit.chunks for unit in plan_units(files)} == {None}
    ordered, _ = run_schedule(files, 3, random.Random(0))
    assert ordered == straight(files) and len(ordered) == 160
