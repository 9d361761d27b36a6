"""Writes the tables of the documents from the results in this folder.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table of
results/NAME.json. With --check nothing is written, and a block that differs is an error.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
DOCUMENTS = [ROOT / "packages" / "nmoe-kernels" / "README.md"]
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """The rows of a result as a Markdown table, under a line that says what measured them."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    machine = report["hardware"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"{machine['date']}; medians of {report['repeats']}, the router included.",
        "",
        "| T, H, I, E, K | routing | backend | forward ms | TFLOP/s | both ms | TFLOP/s "
        "| peak GiB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in report["rows"] if row["forward_ms"] is not None]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, object]) -> str:
    cells = [
        str(row["shape"]).replace(",", ", "),
        row["routing"],
        row["backend"],
        f"{row['forward_ms']:.2f}",
        f"{row['forward_tflops']:.0f}",
        f"{row['both_ms']:.2f}",
        f"{row['both_tflops']:.0f}",
        "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}",
        f"{row['error']:.1e}",
    ]
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
