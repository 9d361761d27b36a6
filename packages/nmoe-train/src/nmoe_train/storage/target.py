"""Files of a place that a URL names: written whole or not at all, verified, and tried again.

fsspec speaks to the storage; s3fs sends a file in parts of `part_bytes`. An object appears once all
of its parts are there, and a local file by a rename. What was written counts when the size is
right and the storage's tag is the MD5 of what was sent (S3, as the MD5 of the parts' MD5s), or,
where there is no such tag, when it is read back and has the same SHA-256.
"""

import errno
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from nmoe_data.files import sync_path

from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import corrupt

Result = TypeVar("Result")

SMALLEST_PART_BYTES = 8 << 20
MOST_PARTS = 9000
"""S3 takes 10,000."""
READ_BYTES = 16 << 20
SHORTEST_REQUEST_S = 0.5
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
HOPELESS = (PermissionError, FileNotFoundError, TrainError)
"""What trying again does not mend."""


class Target:
    """Files below `url`, by names with `/`.

    `patience_s`: how long an operation that fails is tried again; a third of it is how long
    one request to S3 may take. `limit`: bytes a second that are sent at most. Raises TrainError
    `E-MIRROR-PACKAGE` or `E-MIRROR-URL`.
    """

    def __init__(self, url: str, patience_s: float, limit: float | None = None) -> None:
        self.url = shown(url.rstrip("/"))
        self._fs, self._base = _file_system(url, patience_s)
        self._patience_s = patience_s
        self._limiter = Limiter(limit)
        self._local = "file" in _protocols(self._fs)

    def names(self, folder: str = "") -> list[str]:
        """Names of what is in a folder; none where it is not there."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of each file in a folder, by name; folders in it are there with 0."""

        def look() -> list[dict[str, Any]]:
            try:
                return list(self._fs.ls(self._at(folder), detail=True))
            except FileNotFoundError:
                return []

        found = {e["name"].rstrip("/").rsplit("/", 1)[-1]: e for e in self._again(look)}
        return {name: int(entry.get("size") or 0) for name, entry in found.items()}

    def read(self, name: str) -> bytes | None:
        """A small file's content; None where there is none."""
        try:
            content: bytes = self._again(lambda: self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file and reads it back. Raises OSError."""

        def put() -> None:
            with self._new_file(name, SMALLEST_PART_BYTES) as file:
                file.write(content)
            if self._fs.cat_file(self._at(name)) != content:
                raise OSError(f"{self.url}/{name} is not what was written")

        self._again(put)

    def upload(self, source: Path, name: str, sha256: str, sent: Callable[[int], None]) -> None:
        """Makes `name` a copy of a local file, unless it is one; `sent` is told of every part.

        Raises TrainError `E-CHECKPOINT-CORRUPT` where the local file does not have that sha256 (it
        is not sent then), and what the storage raises once patience is over.
        """
        size = source.stat().st_size
        part_bytes = part_size(size)

        def put() -> None:
            if self._size(name) == size:
                digests = Digests(part_bytes)
                for part in _parts(source, part_bytes):
                    digests.add(part)
                digests.check(source, sha256)
                if self._has(name, digests):
                    sent(size)
                    return
            self._send(source, name, sha256, part_bytes, sent)

        self._again(put)

    def _send(
        self, source: Path, name: str, sha256: str, part_bytes: int, sent: Callable[[int], None]
    ) -> None:
        digests, done = Digests(part_bytes), 0
        try:
            with self._new_file(name, part_bytes) as file:
                for part in _parts(source, part_bytes):
                    self._limiter.spend(len(part))
                    digests.add(part)
                    file.write(part)
                    done += len(part)
                    sent(len(part))
                digests.check(source, sha256)
            if self._size(name) != done or not self._has(name, digests):
                raise OSError(f"{self.url}/{name} is not what was sent")
        except BaseException:
            sent(-done)
            raise

    @contextmanager
    def _new_file(self, name: str, part_bytes: int) -> Iterator[Any]:
        """A file that appears under its name at the end of the block, unless that raises."""
        place = self._at(name)
        if self._local:
            temporary = f"{place}.tmp"
            with self._fs.open(temporary, "wb") as file:
                yield file
            sync_path(Path(temporary))
            Path(temporary).replace(place)
            sync_path(Path(place).parent)
            return
        file = self._fs.open(place, "wb", block_size=part_bytes, autocommit=False)
        try:
            yield file
            file.close()
            file.commit()
        except BaseException:
            # Its end would else write what is there, as if that were all.
            with suppress(Exception):
                file.discard()
            file.closed = True
            raise

    def _size(self, name: str) -> int | None:
        try:
            return int(self._fs.info(self._at(name))["size"])
        except FileNotFoundError:
            return None

    def _has(self, name: str, digests: "Digests") -> bool:
        """Whether a file of the right size has the content that the digests are of."""
        tag = str(self._fs.info(self._at(name)).get("ETag", "")).strip('"')
        if tag and tag in digests.tags():
            return True
        read = hashlib.sha256()
        for part in self.parts(name):
            read.update(part)
        return read.hexdigest() == digests.sha256.hexdigest()

    def parts(self, name: str) -> Iterator[bytes]:
        """A file's content, piece after piece; each is tried again by itself."""
        place = self._at(name)
        size = int(self._again(lambda: self._fs.info(place))["size"])
        for start in range(0, size, READ_BYTES):
            end = min(size, start + READ_BYTES)

            def piece(start: int = start, end: int = end) -> bytes:
                content: bytes = self._fs.cat_file(place, start=start, end=end)
                if len(content) != end - start:
                    raise OSError(f"{self.url}/{name} ends too soon")
                return content

            yield self._again(piece)

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all in it; nothing where there is none."""

        def away() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm(self._at(name), recursive=True)

        self._again(away)

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _again(self, action: Callable[[], Result]) -> Result:
        """Acts, and again while it fails by what may pass; raises OSError after that."""
        pause_s, until_s = FIRST_PAUSE_S, None
        while True:
            try:
                return action()
            except HOPELESS:
                raise
            # Each storage raises kinds of its own.
            except Exception as error:
                until_s = until_s or time.monotonic() + self._patience_s
                if time.monotonic() + pause_s > until_s:
                    raise OSError(errno.EIO, reason(error)) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Digests:
    """Checksums of a file's content, given part after part."""

    def __init__(self, part_bytes: int) -> None:
        self.sha256 = hashlib.sha256()
        self._part_bytes = part_bytes
        self._whole = hashlib.md5(usedforsecurity=False)
        self._of_parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """The next part; all but the last are as long as was said."""
        self.sha256.update(part)
        self._whole.update(part)
        self._of_parts.append(hashlib.md5(part, usedforsecurity=False).digest())

    def tags(self) -> set[str]:
        """What S3 calls the content, sent at once or in these parts."""
        parts = hashlib.md5(b"".join(self._of_parts), usedforsecurity=False).hexdigest()
        return {self._whole.hexdigest(), f"{parts}-{len(self._of_parts)}"}

    def check(self, source: Path, sha256: str) -> None:
        """Raises TrainError `E-CHECKPOINT-CORRUPT` unless the content has this sha256."""
        if self.sha256.hexdigest() != sha256:
            raise corrupt(source, "does not have the checksum in meta.json")


class Limiter:
    """Lets threads send so many bytes a second together; None for no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_s = 0.0

    def spend(self, count: int) -> None:
        """Waits until this many bytes may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now_s = time.monotonic()
            start_s = max(now_s, self._free_s)
            self._free_s = start_s + count / self._rate
        time.sleep(start_s - now_s)


def part_size(size: int) -> int:
    """Bytes of the parts in which a file of this size is sent."""
    return max(SMALLEST_PART_BYTES, -(-size // MOST_PARTS))


def shown(url: str) -> str:
    """`url` without a user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def is_url(place: str) -> bool:
    """Whether a place is a URL, and no local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]*://", place) is not None


def reason(error: BaseException) -> str:
    """What went wrong with a storage, on one line."""
    kinds = {PermissionError: "access denied", FileNotFoundError: "not there"}
    kind = next((text for known, text in kinds.items() if isinstance(error, known)), "")
    text = shown(" ".join(str(error).split()))[:300] or type(error).__name__
    return f"{kind} ({text})" if kind else text


def check_url(url: str) -> None:
    """Raises TrainError `E-MIRROR-PACKAGE` or `E-MIRROR-URL` where the URL cannot be used here."""
    _file_system(url, 1.0)


def _file_system(url: str, patience_s: float) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    scheme = url.split("://", 1)[0].lower()
    if not is_url(url) or scheme == "memory":
        raise TrainError(
            "E-MIRROR-URL",
            f"{shown(url)} is no URL of a place that outlives the run",
            "name one such as s3://bucket/prefix or file:///mnt/share",
        )
    try:
        from fsspec.core import url_to_fs

        file_system, base = url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **_options(scheme, patience_s)
        )
    except ImportError as error:
        raise TrainError(
            "E-MIRROR-PACKAGE",
            f"{shown(url)} needs a package that is not installed ({reason(error)})",
            "pip install 'nmoe-train[s3]', or what fsspec names for another kind of storage",
        ) from error
    # A storage checks its own addresses, each in its way.
    except Exception as error:
        raise TrainError(
            "E-MIRROR-URL", f"{shown(url)}: {reason(error)}", "check the address"
        ) from error
    if hasattr(file_system, "retries"):
        # A few, at once, for each part; what lasts longer is tried again here.
        file_system.retries = 3
    return file_system, str(base).rstrip("/")


def _options(scheme: str, patience_s: float) -> dict[str, Any]:
    """What a kind of storage must be told."""
    if scheme == "file":
        return {"auto_mkdir": True}
    if scheme not in ("s3", "s3a"):
        return {}
    from nmoe_train.storage.s3_session import bounded_session

    longest_s = max(SHORTEST_REQUEST_S, patience_s / 3)
    config = {
        "connect_timeout": min(5.0, longest_s),
        "read_timeout": longest_s,
        "retries": {"max_attempts": 0},
        "http_session_cls": bounded_session(longest_s),
    }
    return {"config_kwargs": config}


def _protocols(file_system: Any) -> tuple[str, ...]:
    names = file_system.protocol
    return (names,) if isinstance(names, str) else tuple(names)


def _parts(source: Path, part_bytes: int) -> Iterator[bytes]:
    file: BinaryIO
    with source.open("rb") as file:
        while part := file.read(part_bytes):
            yield part
