"""Real text that is always there: pieces of Python's own modules."""

import os
import random
from functools import cache
from pathlib import Path

PIECE_CHARACTERS = 1500


@cache
def stdlib_pieces() -> tuple[str, ...]:
    """Pieces of Python's own modules, shuffled, no two alike."""
    folder = Path(os.__file__).parent
    texts = (
        path.read_text()
        for name in ("email", "asyncio", "json")
        for path in sorted((folder / name).rglob("*.py"))
        if "test" not in path.parts
    )
    texts = (*texts, *(path.read_text() for path in sorted(folder.glob("*.py"))))
    pieces = {
        text[start : start + PIECE_CHARACTERS]
        for text in texts
        for start in range(0, len(text) - 300, PIECE_CHARACTERS)
    }
    return tuple(random.Random(0).sample(sorted(pieces), len(pieces)))
