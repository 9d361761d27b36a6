"""Writes the tables of the documents from the results in this folder.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table of
results/NAME.json, whose field `bench` says what was measured. With --check nothing is written, and
a block that differs is an error.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
DOCUMENTS = [ROOT / "packages" / "nmoe-kernels" / "README.md"]
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PRODUCTS = ("up", "down", "grad_a", "grad_x", "grad_down", "grad_gate_up")

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def number(field: str, digits: str = ".2f") -> Callable[[Row], str]:
    """A cell with a figure, or a dash where there is none."""
    return lambda row: "-" if row.get(field) is None else format(row[field], digits)


def ratio(field: str) -> Callable[[Row], str]:
    """A cell with how many times longer than the ceiling it took: one over the share."""
    return lambda row: "-" if row.get(field) is None else f"{1 / row[field]:.2f}x"


def first_call(row: Row) -> str:
    """A cell with the first call, cold and cached, in seconds."""
    if row.get("first_call_cold_s") is None:
        return "-"
    return f"{row['first_call_cold_s']:.1f} / {row['first_call_warm_s']:.1f}"


NAMES: list[Column] = [
    ("routing", lambda row: row["routing"]),
    ("contender", lambda row: row["contender"]),
]
COLUMNS: dict[str, list[Column]] = {
    "moe": [
        ("T, H, I, E, K", lambda row: row["shape"].replace(",", ", ")),
        *NAMES,
        ("forward ms", number("forward_ms")),
        ("TFLOP/s", number("forward_tflops", ".0f")),
        ("of dense", number("forward_share", ".0%")),
        ("both ms", number("both_ms")),
        ("TFLOP/s", number("both_tflops", ".0f")),
        ("of dense", number("both_share", ".0%")),
        ("peak GiB", number("peak_gib")),
        ("first call s, cold / cached", first_call),
        ("error", number("error", ".1e")),
    ],
    "router": [
        ("T, H, E, K", lambda row: row["shape"].replace(",", ", ")),
        *NAMES,
        ("forward ms", number("forward_ms", ".4f")),
        ("reads of x", ratio("forward_share")),
        ("GB/s", number("forward_gbps", ".0f")),
        ("both ms", number("both_ms", ".4f")),
        ("first call s, cold / cached", first_call),
        ("error", number("error", ".1e")),
    ],
    "gemm": [
        ("T, H, I, E, K", lambda row: row["shape"].replace(",", ", ")),
        *NAMES,
        *((f"{name} TFLOP/s", number(f"{name}_tflops", ".0f")) for name in PRODUCTS),
        ("error", number("error", ".1e")),
    ],
    "rdep": [
        ("T, H, E, K", lambda row: row["shape"].replace(",", ", ")),
        *NAMES,
        ("dispatch ms", number("dispatch_ms", ".3f")),
        ("of peer copy", number("dispatch_share", ".0%")),
        ("combine ms", number("combine_ms", ".3f")),
        ("of peer copy", number("combine_share", ".0%")),
        ("layer from a graph ms", number("graph_ms", ".3f")),
        ("waits of the host", number("host_waits_per_layer", "d")),
        ("error", number("error", ".1e")),
    ],
}


def table(name: str) -> str:
    """A result as Markdown: what measured it, its rows, who was not timed, others' figures."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    timed = [row for row in report["rows"] if _is_timed(row)]
    # A column in which nobody has a figure says nothing.
    columns = [
        (head, cell)
        for head, cell in COLUMNS[report["bench"]]
        if any(cell(row) != "-" for row in timed)
    ]
    lines = [
        _heading(report),
        "",
        _cells(head for head, _ in columns),
        "|" + "---|" * len(columns),
        *(_cells(cell(row) for _, cell in columns) for row in timed),
    ]
    return "\n".join([*lines, *_untimed(report), *_published(report)]) + "\n"


def _heading(report: Mapping[str, Any]) -> str:
    machine, ceilings = report["hardware"], report.get("ceilings")
    text = (
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"{machine['date']}; medians of {report['repeats']}"
    )
    if report["bench"] == "moe":
        text += ", the router included"
    if report["bench"] == "rdep":
        text += f"; {report['ranks']} GPUs, a copy between them {report['copy_gbps']:.0f} GB/s"
    if ceilings:
        text += (
            f"; in the same run a dense product of {ceilings['dense_size']} cubed "
            f"{ceilings['dense_tflops']:.0f} TFLOP/s, a copy {ceilings['copy_gbps']:.0f} GB/s"
        )
    return text + "."


def _untimed(report: Mapping[str, Any]) -> list[str]:
    reasons = dict.fromkeys(
        f"{row['contender']}: {row['note']}" for row in report["rows"] if not _is_timed(row)
    )
    return ["", "Not timed: " + "; ".join(reasons) + "."] if reasons else []


def _published(report: Mapping[str, Any]) -> list[str]:
    if not report.get("published"):
        return []
    lines = ["", f"Published by others ({report['published'][0]['conditions']}):", ""]
    lines += [_cells(("T, H, E, K", "source", "forward ms", "both ms")), "|---|---|---|---|"]
    for row in report["published"]:
        shape = row["shape"].replace(",", ", ")
        lines.append(
            _cells((shape, row["source"], f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}"))
        )
    return lines


def _is_timed(row: Row) -> bool:
    return any(name.endswith("_ms") and value is not None for name, value in row.items())


def _cells(cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(check: bool) -> int:
    """Rewrites or checks every document; the number of those that were not up to date."""
    stale = 0
    for document in DOCUMENTS:
        before = document.read_text()
        after = BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}{block[3]}", before)
        if after != before:
            stale += 1
            sys.stderr.write(f"{document.relative_to(ROOT)} is not what the results say\n")
            if not check:
                document.write_text(after)
    return stale


if __name__ == "__main__":
    stale = main(check="--check" in sys.argv)
    sys.exit(1 if stale and "--check" in sys.argv else 0)
