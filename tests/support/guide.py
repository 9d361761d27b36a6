"""Commands that a README shows, to be run as they stand there."""

import re
from pathlib import Path

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shell_commands(readme: Path) -> list[str]:
    """The lines of all blocks marked `sh`."""
    blocks = BLOCK.findall(readme.read_text())
    return [line for block in blocks for line in block.splitlines() if line.strip()]
