"""Runs that lie in a bucket: a mirror of their small files in a folder, which all else reads.

A refresh lists everything below the URL and copies what is new or changed by its tag, size or time;
each file is replaced whole, from one that was written beside it. What the listing no longer has is
removed. A listing that fails, or is empty all at once, removes nothing: the mirror stays as it was,
and its state says since when. Objects are replaced and not appended to, so a grown one is read
whole: only the newest rows of a run are in files that grow.

A mirror lies in the user's cache folder, one for each URL, and holds at most `MOST_BYTES`, the
newest files first. Files of tensors are there as holes of their size, which take no space.
"""

import hashlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from nviz.errors import VizError
from nviz.store.remote_names import RemoteFile, remote_file

EVERY_S = 3.0
MOST_BYTES = 16 * 2**30
MOST_FILE_BYTES = 256 * 2**20
COPIES_AT_ONCE = 8
# So many copies are lost, at most, when the process is killed while it fills a mirror.
SAVED_EVERY = 256
ABANDONED_AFTER_S = 3600.0
TRIES = 2
OPTIONS: dict[str, dict[str, Any]] = {
    # A silent server is told after `TRIES` of these: waiting longer would only look like hanging.
    "s3": {
        "config_kwargs": {
            "connect_timeout": 3,
            "read_timeout": 10,
            "retries": {"max_attempts": 0},
        }
    }
}
REMEDY = "check the address, the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID) and the network"


def is_url(runs: str) -> bool:
    """Whether `runs` names a place that is mirrored, and no local folder."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]*://", runs) is not None


def shown(url: str) -> str:
    """`url` without a user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


@dataclass(frozen=True, slots=True)
class MirrorState:
    """How a mirror stands: when it was last compared with the storage, why it could not be since
    then (None if it could), how many copies are still to make, and what could not be copied."""

    compared_unix_s: float | None = None
    problem: str | None = None
    waiting: int = 0
    left_out: tuple[str, ...] = ()


class Mirror:
    """A folder that follows a URL. One thread at a time refreshes; any may read `state`."""

    def __init__(self, url: str, cache: Path) -> None:
        """Raises VizError `E-REMOTE-PACKAGE`, `E-REMOTE-URL`, or `E-REMOTE-CACHE` if the mirror's
        folder below `cache` cannot be made."""
        self.url = shown(url)
        self.state = MirrorState()
        self._fs, self._base = _file_system(url)
        place = cache / hashlib.sha256(url.encode()).hexdigest()[:24]
        # The folder's name is the key of a run that lies at the URL itself.
        name = re.sub(r"[^\w.\-]|^\.+", "_", self._base.rstrip("/").rsplit("/", 1)[-1])[:100]
        self.root = place / "files" / (name or "runs")
        self._partial = place / "partial"
        self._index = place / "index.json"
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
            _remove_abandoned(self._partial)
            self._known = _known(self.root, self._index)
        except OSError as error:
            raise VizError(
                "E-REMOTE-CACHE",
                f"{place} cannot be written ({error.strerror})",
                "set XDG_CACHE_HOME to a folder that can",
            ) from error
        self._ended = threading.Event()

    def refresh(self) -> None:
        """Makes the mirror equal to what the URL holds now.

        Raises VizError `E-REMOTE` if it cannot be listed, `E-REMOTE-EMPTY` if nothing is there.
        """
        self._take(self._listed())

    def follow(self) -> None:
        """Refreshes every few seconds beside the caller until `end`.

        Raises VizError like `refresh` if the first listing fails; later failures are in `state`.
        """
        found = self._listed()
        threading.Thread(
            target=self._follow, args=(found,), daemon=True, name="nviz-mirror"
        ).start()

    def end(self) -> None:
        """Stops following, after the copies that are under way."""
        self._ended.set()

    def _follow(self, found: list[RemoteFile]) -> None:
        self._take(found)
        took_s = 0.0
        # A large listing is paid for: no more than half of the time goes into it.
        while not self._ended.wait(max(EVERY_S, took_s)):
            began = time.monotonic()
            try:
                self.refresh()
            except VizError as error:
                self.state = replace(self.state, problem=str(error), waiting=0)
            took_s = time.monotonic() - began

    def _listed(self) -> list[RemoteFile]:
        try:
            entries = self._fs.find(self._base, detail=True)
        # Each storage raises kinds of its own; all mean that there is no listing.
        except Exception as error:
            raise VizError("E-REMOTE", f"{self.url}: {_reason(error)}", REMEDY) from error
        if not entries:
            raise VizError(
                "E-REMOTE-EMPTY", f"{self.url} holds nothing", "give the prefix that holds the runs"
            )
        files = (remote_file(name, self._base, info) for name, info in entries.items())
        return [file for file in files if file]

    def _take(self, listed: list[RemoteFile]) -> None:
        compared = time.time()
        kept, left_out = _within_bounds(listed)
        gone = self._known.keys() - {file.path for file in kept}
        for path in gone:
            self._remove(path)
        changed = [file for file in kept if self._known.get(file.path) != file.version]
        waiting = len(changed)
        self.state = MirrorState(compared, None, waiting, tuple(left_out))
        changed.sort(key=lambda file: (file.order, -(file.modified_unix_s or 0.0)))
        with ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="nviz-copy") as pool:
            for batch in _batches(changed):
                left_out += [problem for problem in pool.map(self._copy, batch) if problem]
                left_out += self._saved()
                waiting -= len(batch)
                self.state = MirrorState(compared, None, waiting, tuple(left_out))
                if self._ended.is_set():
                    return
        if gone:
            self._saved()

    def _copy(self, file: RemoteFile) -> str | None:
        """Brings one file; returns why it could not be, or None."""
        target, partial = self.root / file.path, self._partial / uuid.uuid4().hex
        try:
            if file.measured:
                with partial.open("wb") as hole:
                    hole.truncate(file.size)
            else:
                self._fs.get_file(file.source, str(partial))
                # It was replaced since the listing, maybe sealed: the next one has its part too.
                if partial.stat().st_size < file.size:
                    return None
            if file.modified_unix_s is not None:
                os.utime(partial, (file.modified_unix_s, file.modified_unix_s))
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)
            self._known[file.path] = file.version
        except FileNotFoundError:
            return None
        # As in a listing; whatever it is, the other files are copied.
        except Exception as error:
            return f"{file.path}: {_reason(error)}"
        finally:
            partial.unlink(missing_ok=True)
        return None

    def _remove(self, path: str) -> None:
        target = self.root / path
        try:
            target.unlink(missing_ok=True)
            for folder in target.parents:
                if folder == self.root:
                    break
                folder.rmdir()
        except OSError:
            # Its folder holds other files.
            pass
        self._known.pop(path, None)

    def _saved(self) -> list[str]:
        """Writes down which versions are here; returns why it could not, if so."""
        partial = self._partial / uuid.uuid4().hex
        try:
            partial.write_text(json.dumps(self._known))
            partial.replace(self._index)
        except OSError as error:
            return [f"{self._index}: {error.strerror}"]
        return []


def cache_folder() -> Path:
    """Where mirrors lie: `nviz` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nviz"


@cache
def mirror_of(url: str) -> Mirror:
    """The process's mirror of `url`. Raises VizError like `Mirror`."""
    return Mirror(url, cache_folder())


def _file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs

        options = OPTIONS.get(url.split("://", 1)[0].lower(), {})
        file_system, base = url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ImportError as error:
        raise VizError(
            "E-REMOTE-PACKAGE",
            f"{shown(url)} needs a package that is not installed ({_reason(error)})",
            "pip install 'nviz[s3]', or what fsspec names for another kind of storage",
        ) from error
    # A storage checks its own addresses, each in its way.
    except Exception as error:
        raise VizError("E-REMOTE-URL", f"{shown(url)}: {_reason(error)}", REMEDY) from error
    if hasattr(file_system, "retries"):
        file_system.retries = TRIES
    return file_system, str(base)


def _reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    kinds = {PermissionError: "access denied", FileNotFoundError: "not there"}
    kind = next((text for known, text in kinds.items() if isinstance(error, known)), "")
    text = shown(" ".join(str(error).split()))[:300] or type(error).__name__
    return f"{kind} ({text})" if kind else text


def _within_bounds(listed: Iterable[RemoteFile]) -> tuple[list[RemoteFile], list[str]]:
    """The files to keep, the newest until the mirror is full, and a line on each left out."""
    kept, left_out, held = [], [], 0
    newest = sorted(listed, key=lambda file: (file.order != 0, -(file.modified_unix_s or 0.0)))
    for file in newest:
        weight = 0 if file.measured else file.size
        if weight > MOST_FILE_BYTES:
            left_out.append(f"{file.path}: larger than {MOST_FILE_BYTES // 2**20} MiB")
        elif held + weight > MOST_BYTES:
            left_out.append(f"{file.path}: the mirror holds {MOST_BYTES // 2**30} GiB already")
        else:
            held += weight
            kept.append(file)
    return kept, left_out


def _batches(files: list[RemoteFile]) -> Iterable[list[RemoteFile]]:
    """`files` in parts of one order each, so that a part waits for those before it."""
    for _, same in groupby(files, key=lambda file: file.order):
        group = list(same)
        for start in range(0, len(group), SAVED_EVERY):
            yield group[start : start + SAVED_EVERY]


def _known(root: Path, index: Path) -> dict[str, str]:
    """Version by path of the files that are here; empty versions where none was written down."""
    try:
        versions = json.loads(index.read_text())
    except (OSError, ValueError):
        versions = {}
    if not isinstance(versions, dict):
        versions = {}
    here = (path for path in root.rglob("*") if path.is_file())
    names = (path.relative_to(root).as_posix() for path in here)
    return {name: str(versions.get(name, "")) for name in names}


def _remove_abandoned(folder: Path) -> None:
    """Removes what a killed process left half copied."""
    for path in folder.iterdir():
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()
        except FileNotFoundError:
            continue
