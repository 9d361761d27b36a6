"""Checkpoints in the mirror: folders below a URL, complete and verified, or invisible.

`URL/step-00001000/` holds the same files as the local folder. `COMPLETE` is written last, once
every file of every rank is there and verified, and removed first; so at any instant what is visible
is whole, as in the local tier.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nmoe_data.files import atomic_write, sync_path, write_all

from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import (
    COMPLETE,
    CORRUPT,
    FOLDER_NAME,
    META,
    corrupt,
    parse_meta,
    read_meta,
    step_of,
    verify,
)
from nmoe_train.storage.target import Target, reason

FILES_AT_ONCE = 4


class Mirror:
    """The checkpoints below a target; one process at a time writes there."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.url = target.url

    def folders(self) -> list[str]:
        """Names of the checkpoint folders, complete or not, newest first."""
        return [name for name in reversed(self.target.names()) if FOLDER_NAME.fullmatch(name)]

    def complete(self) -> list[str]:
        """Names of the complete folders, newest first."""
        return [name for name in self.folders() if self.target.read(f"{name}/{COMPLETE}")]

    def holds(self, folder: Path) -> bool:
        """Whether the local folder is complete there, as it is, with files of the same sizes."""
        there = self.target.read(f"{folder.name}/{COMPLETE}")
        if there is None or there != (folder / COMPLETE).read_bytes():
            return False
        sizes = self.target.sizes(folder.name)
        files = read_meta(folder)["files"]
        return all(sizes.get(name) == entry["bytes"] for name, entry in files.items())

    def upload(self, folder: Path, sent: Callable[[int], None]) -> None:
        """Copies a complete local folder; `sent` is told bytes, less than 0 for those in vain.

        Raises TrainError `E-CHECKPOINT-CORRUPT` where a local file is damaged, FileNotFoundError
        where the folder goes meanwhile, and what the storage raises.
        """
        files, name = read_meta(folder)["files"], folder.name
        meta, complete = (folder / META).read_bytes(), (folder / COMPLETE).read_bytes()
        if self.target.read(f"{name}/{COMPLETE}") is not None:
            # Of another checkpoint of this step, which was made again.
            self.target.remove(f"{name}/{COMPLETE}")

        def one(file: str) -> None:
            wanted = files[file]["sha256"]
            self.target.upload(folder / file, f"{name}/{file}", wanted, sent)

        _all(one, files)
        self.target.write(f"{name}/{META}", meta)
        there = self.target.sizes(name)
        for file, entry in files.items():
            if there.get(file) != entry["bytes"]:
                raise OSError(f"{self.url}/{name}/{file} is not there any more")
        self.target.write(f"{name}/{COMPLETE}", complete)

    def prune(self, step: int, keep: int | None) -> None:
        """Removes what is older than `step`, which is complete: unfinished folders, and all but the
        newest `keep` - 1 complete ones. None keeps everything."""
        if keep is None:
            return
        older = [name for name in self.folders() if step_of(name) < step]
        complete = set(self.complete())
        kept = [name for name in older if name in complete]
        for name in older:
            if name not in kept[: keep - 1]:
                self.target.remove(f"{name}/{COMPLETE}")
                self.target.remove(name)

    def meta(self, name: str) -> dict[str, Any]:
        """The meta.json of a complete folder. Raises what `read_meta` does."""
        place = f"{self.url}/{name}"
        content = self.target.read(f"{name}/{META}")
        wanted = self.target.read(f"{name}/{COMPLETE}")
        if content is None or wanted is None:
            raise corrupt(f"{place}/{META}", "cannot be read (it is not there)")
        return parse_meta(content, wanted, place)

    def fetch(self, name: str, root: Path, guard: Callable[[], None]) -> None:
        """Copies a complete folder to `root`, verified, where it is complete last of all.

        `guard` is called before each file, and raises where this process may no longer write: one
        that was stopped for a while must not write into what another has fetched meanwhile.
        Raises TrainError `E-CHECKPOINT-CORRUPT` where it is damaged, OSError of the disk, and what
        the storage and `guard` raise.
        """
        files, folder = self.meta(name)["files"], root / name
        guard()
        if folder.exists():
            # Unfinished, or damaged; else nobody would fetch.
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)

        def one(file: str) -> None:
            guard()
            self._fetch_file(f"{name}/{file}", folder / file, files[file])

        _all(one, files)
        for file in (META, COMPLETE):
            content = self.target.read(f"{name}/{file}")
            if content is None:
                raise corrupt(f"{self.url}/{name}/{file}", "cannot be read (it is not there)")
            if file == COMPLETE:
                parse_meta((folder / META).read_bytes(), content, f"{self.url}/{name}")
            guard()
            with _naming(folder / file):
                atomic_write(folder / file, content)
        sync_path(root)
        verify(folder)

    def _fetch_file(self, name: str, file: Path, entry: dict[str, Any]) -> None:
        with file.open("xb", buffering=0) as out:
            for part in self._checked(name, entry):
                with _naming(file):
                    write_all(out, part)
            with _naming(file):
                os.fsync(out.fileno())

    def _checked(self, name: str, entry: dict[str, Any]) -> Iterator[bytes]:
        """A file's content, piece after piece; raises at its end where it is not what it was."""
        digest, place = hashlib.sha256(), f"{self.url}/{name}"
        try:
            for part in self.target.parts(name):
                digest.update(part)
                yield part
        except FileNotFoundError:
            raise corrupt(place, "cannot be read (it is not there)") from None
        if digest.hexdigest() != entry["sha256"]:
            raise corrupt(place, "does not have the checksum in meta.json")

    def damages(self, name: str) -> list[str]:
        """What is wrong with each file of a complete folder; all are read. Raises
        `E-CHECKPOINT-VERSION`, and what the storage raises."""
        try:
            files = self.meta(name)["files"]
        except TrainError as error:
            if error.code != CORRUPT:
                raise
            return [str(error)]
        found = []
        for file, entry in files.items():
            try:
                for _ in self._checked(f"{name}/{file}", entry):
                    pass
            except TrainError as error:
                found.append(str(error))
        return found


def fetch_newest(
    mirror: Mirror, root: Path, tell: Callable[[str], None], guard: Callable[[], None]
) -> tuple[str | None, list[str]]:
    """Copies the newest sound checkpoint of a mirror to `root`; its name, if there is one, and what
    is wrong with newer ones. `guard` is that of `Mirror.fetch`.

    Raises TrainError `E-CHECKPOINT-CORRUPT` where none is sound, `E-MIRROR` where the storage does
    not answer (whether there is something to go on from is then unknown), OSError of the disk.
    """
    problems: list[str] = []
    try:
        names = mirror.complete()
        for name in names:
            tell(f"fetching {name} from {mirror.url}")
            try:
                mirror.fetch(name, root, guard)
            except TrainError as error:
                if error.code != CORRUPT:
                    raise
                problems.append(str(error))
            else:
                return name, problems
    except TrainError:
        raise
    except Exception as error:  # each storage raises kinds of its own
        if isinstance(error, OSError) and str(root) in str(error.filename):
            raise
        raise TrainError(
            "E-MIRROR",
            f"no checkpoint is here, and {mirror.url} cannot be asked for one: {reason(error)}",
            "check the address, the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID) and the network, "
            "or start without checkpoint.mirror",
        ) from error
    if problems:
        raise TrainError(
            CORRUPT,
            f"none of the {len(problems)} checkpoints of {mirror.url} is sound ({problems[0]})",
            "start again in another run folder",
        )
    return None, []


def mirror_url(prefix: str, run: Path) -> str:
    """Where the checkpoints of a run folder are below the configured prefix."""
    return f"{prefix.rstrip('/')}/{run.resolve().name}/checkpoints"


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Has an error of writing say which file of this machine it was, and so that it was one."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise


def _all(action: Callable[[str], None], names: Any) -> None:
    """Acts on every name, several at once; the first error once all have ended."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for done in [pool.submit(action, name) for name in names]:
            done.result()
