"""`rejected.jsonl`: a line for each refused record, with its source, its place and the reason."""

import os
from pathlib import Path

import orjson

from nmoe_data.files import write_all

REJECTED_NAME = "rejected.jsonl"


class RejectLog:
    """Appends to `rejected.jsonl`, cut back to `kept_bytes` first (0 starts it afresh)."""

    def __init__(self, out: Path, kept_bytes: int) -> None:
        path = out / REJECTED_NAME
        path.touch()
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(kept_bytes)
        self._file.seek(kept_bytes)
        self._pending: list[bytes] = []

    def append(self, source: str, offset: int, reason: str, detail: str) -> None:
        """Notes one refused record."""
        row = {"source": source, "offset": offset, "reason": reason, "detail": detail}
        self._pending.append(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def checkpoint(self) -> int:
        """Makes all rows durable and returns the size of the file."""
        write_all(self._file, b"".join(self._pending))
        self._pending.clear()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Releases the file."""
        self._file.close()
