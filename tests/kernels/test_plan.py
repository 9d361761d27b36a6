"""Properties of the plan of rows that the Triton kernels work on."""

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_every_row_has_one_place_for_any_ids() -> None:
    command = [sys.executable, str(SUPPORT / "plan_properties.py"), "40"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "all hold\n"
