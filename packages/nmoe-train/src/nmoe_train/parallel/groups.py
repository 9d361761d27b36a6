"""The process groups of a run, and how its ranks agree.

Tensors are added over ranks by torch.distributed: NCCL between GPUs, gloo between CPUs. Where ranks
talk (who may write, whether a file was written, what went wrong), they leave their words in the
launcher's key-value store and meet in a group without a deadline, as a checkpoint may take long; a
rank that dies ends the meeting at once. Whoever fails first says so in the store; the others then
end without a word of their own, so that one fault is one message.
"""

import base64
import datetime
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nmoe_train.errors import USER_ERROR, TrainError
from nmoe_train.parallel.layout import Layout

Result = TypeVar("Result")

FAILED = "failed"
DEADLINE = "parallel.rdep.deadline_s"
NO_DEADLINE = datetime.timedelta(days=365)
REMEDY = "see what ended that rank, and run the same command again to go on"
PEER_CODES = ("E-PEER", "E-GROUP", "E-RDEP-PEER", "E-RDEP-LATE")
"""Codes of errors that say that another rank is gone or late."""

OWN_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors of this rank's device, which may speak of a time-out too."""
LOST_PEER = re.compile(
    r"(?P<left>connection|broken pipe|end of file|remote process exited|no route|unreachable)"
    r"|timed? ?out",
    re.IGNORECASE,
)
TRANSPORTS = re.compile(r"gloo/(transport|common)/")
"""Where in gloo's sources an error of a connection comes from, which it says."""
SHORTEST_POLL_S, LONGEST_POLL_S = 0.0005, 0.05


class RankFailed(TrainError):
    """A rank said that it failed in what all did, after which all are still there."""

    def __init__(self, what: str) -> None:
        super().__init__("E-PEER", what, REMEDY)


def _nothing() -> None:
    return None


class Groups:
    """What one rank has in common with others; without a store it is the only one.

    Each is None where the rank has nobody to share with. stage: the ranks of its pipeline stage.
    data: those of the stage that hold the same part of the dense weights, one for each share of
    the batch. tensor: those that have the same share. expert: those that hold all experts of the
    stage together, or this rank's part of each. expert_tensor: those that have the other parts of
    its experts. replicas: those that hold the same experts. pipeline: those at the same place of
    every stage, in the order of stages. meeting: all ranks, on their CPUs, with no deadline.
    """

    def __init__(
        self,
        layout: Layout,
        store: Store | None = None,
        meeting: dist.ProcessGroup | None = None,
        *,
        stage: dist.ProcessGroup | None = None,
        data: dist.ProcessGroup | None = None,
        tensor: dist.ProcessGroup | None = None,
        expert: dist.ProcessGroup | None = None,
        expert_tensor: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        self.layout = layout
        self.stage, self.data, self.tensor = stage, data, tensor
        self.expert, self.expert_tensor, self.replicas = expert, expert_tensor, replicas
        self.pipeline = pipeline
        self._store, self._meeting = store, meeting
        self.guard: Callable[[], None] = _nothing
        """Called before this rank acts for all; raises where it may no longer."""
        self.waited_s = 0.0
        """Seconds that this rank has spent in these groups: adding up, and waiting for others."""
        self._talks = 0
        self._failed_first = False

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return self._store is None

    @property
    def store(self) -> Store | None:
        """Where the ranks leave words for each other; None for the only one."""
        return self._store

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and keeps the run's record."""
        return self.layout.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds a tensor over all ranks, in place; returns it. Raises TrainError `E-PEER`."""
        if not self.alone:
            with self.waiting("adding over all ranks"):
                dist.all_reduce(tensor)
        return tensor

    def sum_within_(self, tensor: Tensor, group: dist.ProcessGroup | None, of: str) -> Tensor:
        """Adds a tensor over the ranks of one of these groups, in place; returns it.

        `of` says in errors what is added. Without a group the tensor is the sum.
        """
        if group is not None:
            with self.waiting(f"adding {of}"):
                dist.all_reduce(tensor, group=group)
        return tensor

    def counts(self, *numbers: int) -> list[int]:
        """Adds numbers of the host over all ranks, without waiting for a GPU."""
        if self.alone:
            return list(numbers)
        return [int(total) for total in self.sum_(torch.tensor(numbers))]

    def first_does(self, action: Callable[[], Result]) -> Result:
        """Rank 0 acts while the others wait; all return its result, which JSON must hold.

        An exception of rank 0 is raised there, and as TrainError `E-PEER` on the others.
        """
        if self._store is None:
            self.guard()
            return action()
        self._talk(self._store, action if self.first else _nothing)
        result: Result = self._said(self._store, 0)
        return result

    def all_do(self, action: Callable[[], Result]) -> list[Result]:
        """Every rank acts and waits for all; the results, which JSON must hold, go to rank 0.

        The other ranks return an empty list. An exception of one rank is raised there, and as
        TrainError `E-PEER` on the others.
        """
        if self._store is None:
            self.guard()
            return [action()]
        self._talk(self._store, action)
        ranks = range(self.layout.ranks) if self.first else ()
        return [self._said(self._store, rank) for rank in ranks]

    def all_say(self, yes: bool) -> bool:
        """Whether all ranks, which ask each other at the same time, say yes."""
        if self.alone:
            return yes
        with self.waiting("asking the others"):
            return self._meet(int(yes)) == 1

    def said_by(self, rank: int) -> Any:
        """The result of a rank in the last `all_do`, for any rank that asks before the next."""
        assert self._store is not None
        return self._said(self._store, rank)

    def trade(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int
    ) -> list[dist.Work]:
        """Begins to send CPU tensors to ranks and to receive some from others; all to be awaited.

        Of one tag, there is one message from one rank to another at a time.
        """
        works: list[dist.Work | None] = []
        with self._peers("trading with the others"):
            for rank, tensor in received.items():
                works.append(dist.irecv(tensor, rank, group=self._meeting, tag=tag))
            for rank, tensor in sent.items():
                works.append(dist.isend(tensor, rank, group=self._meeting, tag=tag))
        return [work for work in works if work is not None]

    def complete(self, works: Iterable[dist.Work]) -> None:
        """Waits for what `trade` has begun, however long the others take."""
        with self.waiting("trading with the others"):
            for work in works:
                work.wait(NO_DEADLINE)

    def _talk(self, store: Store, action: Callable[[], Any]) -> None:
        """Acts, leaves the result in the store, and waits until all ranks have done so."""
        self._talks += 1
        problem: Exception | None = None
        try:
            self.guard()
            words = action()
        except Exception as error:  # raised below, once the others know
            self.fail()
            problem, words = error, " ".join(str(error).split()) or repr(error)
        try:
            with self.waiting("talking to the others"):
                store.set(f"{self._talks}/{self.layout.rank}", encode_words(words))
                failed = self._meet(self.layout.ranks if problem is None else self.layout.rank)
                if self._talks > 1:
                    # All ranks are here, so none still reads what was said before.
                    store.delete_key(f"{self._talks - 1}/{self.layout.rank}")
        except (TrainError, RuntimeError) as lost:
            # What went wrong here matters more than that another rank is gone as well.
            raise problem or lost from None
        if problem is not None:
            raise problem
        if failed < self.layout.ranks:
            raise RankFailed(f"rank {failed} failed: {self._said(store, failed)}")

    def _said(self, store: Store, rank: int) -> Any:
        with self.waiting("listening to the others"):
            return decode_words(store.get(f"{self._talks}/{rank}"))

    def _meet(self, number: int) -> int:
        """Waits for all ranks, open to signals; the least of their numbers."""
        least = torch.tensor(number)
        work = dist.all_reduce(least, dist.ReduceOp.MIN, group=self._meeting, async_op=True)
        assert work is not None
        pause_s = SHORTEST_POLL_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        work.wait()
        return int(least)

    def fail(self) -> bool:
        """Notes that the run has failed; True for the rank that says so first."""
        if self._store is None:
            return True
        # A second call by the same rank must not find itself beaten.
        if not self._failed_first:
            try:
                self._failed_first = self._store.add(FAILED, 1) == 1
            except RuntimeError:
                # The launcher is gone and its store with it: nobody else can be asked.
                self._failed_first = True
        return self._failed_first

    @contextmanager
    def among_peers(self, doing: str) -> Iterator[None]:
        """Inside, others may talk to peers by torch.distributed: a lost one is `E-PEER`."""
        if self.alone:
            yield
            return
        with self._peers(doing):
            yield

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Inside, this rank does nothing but talk to peers: the time counts as `waited_s`.

        A lost one is `E-PEER`. What a GPU's stream waits for is not the host's time.
        """
        began_s = time.perf_counter()
        try:
            with self._peers(doing):
                yield
        finally:
            self.waited_s += time.perf_counter() - began_s

    @contextmanager
    def _peers(self, doing: str) -> Iterator[None]:
        """Turns what torch.distributed raises when a peer is gone or late into one line.

        Any other error is this rank's own, such as a GPU's that gives up, whatever it waited for.
        """
        try:
            yield
        except RuntimeError as error:
            if not _befell_a_peer(error):
                raise
            what = f"rank {self.layout.rank}, {doing}, {_what_befell_a_peer(str(error))}"
            raise _peer_error(what) from error


ALONE = Groups(Layout())
"""The groups of a process that is the whole run."""


@contextmanager
def open_groups(layout: Layout, device: torch.device, deadline_s: float) -> Iterator[Groups]:
    """Joins the processes that torchrun started; a rank waits for another `deadline_s` seconds.

    Inside, the first rank that fails raises its error, and the others leave by SystemExit.
    Raises TrainError `E-GROUP` when the processes do not find each other.
    """
    if layout.ranks == 1:
        yield ALONE
        return
    groups = _join(layout, device, deadline_s)
    try:
        yield groups
    except Exception as error:  # whatever it is, the first one to fail raises it
        if groups.fail():
            raise
        raise SystemExit(USER_ERROR) from error
    except BaseException:
        groups.fail()
        raise
    dist.destroy_process_group()


def _join(layout: Layout, device: torch.device, deadline_s: float) -> Groups:
    timeout = datetime.timedelta(seconds=deadline_s)
    try:
        shared, *_ = next(rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise _not_found(layout, f"{DEADLINE} = {deadline_s:g}", error) from error
    # A restarted group must not read what the one before it left.
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"nmoe/{generation}", shared)
    return join_groups(layout, device, deadline_s, store)


def join_groups(
    layout: Layout,
    device: torch.device,
    deadline_s: float,
    store: Store,
    connect_s: float | None = None,
) -> Groups:
    """The groups of ranks that find each other in a store where nobody has written before.

    `connect_s`: how long to look for each other, where that is not `deadline_s`. Raises TrainError
    `E-GROUP` when they do not. `dist.destroy_process_group` ends them.
    """
    timeout = datetime.timedelta(seconds=connect_s or deadline_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=layout.rank,
            world_size=layout.ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        groups = make_groups(layout, device)
        meeting = dist.new_group(
            backend="gloo", timeout=NO_DEADLINE if connect_s is None else timeout
        )
        assert isinstance(meeting, dist.ProcessGroup)
    except (RuntimeError, ValueError) as error:
        patience = f"{DEADLINE} = {deadline_s:g}"
        if connect_s is not None:
            patience = f"elastic.deadline_s = {connect_s:g}"
        raise _not_found(layout, patience, error) from error
    if connect_s is not None:
        for group in (dist.group.WORLD, *groups.values()):
            _set_deadline(group, datetime.timedelta(seconds=deadline_s), device)
        _set_deadline(meeting, NO_DEADLINE, torch.device("cpu"))
    return Groups(layout, PrefixStore("talks", store), meeting, **groups)


def _set_deadline(
    group: dist.ProcessGroup | None, deadline: datetime.timedelta, device: torch.device
) -> None:
    """How long operations of a group wait from now on, on the CPU and on the device."""
    assert group is not None
    for kind in {"cpu", device.type}:
        group._get_backend(torch.device(kind))._set_default_timeout(deadline)


def _not_found(layout: Layout, patience: str, error: Exception) -> TrainError:
    reason = str(error).strip().splitlines()[0]
    return TrainError(
        "E-GROUP",
        f"the {layout.ranks} processes do not find each other within {patience} ({reason})",
        "check MASTER_ADDR and MASTER_PORT, which torchrun sets, and that every process runs",
    )


def make_groups(layout: Layout, device: torch.device) -> dict[str, dist.ProcessGroup]:
    """The groups of more than one rank that this rank is in, by their name in `Groups`."""
    dense = init_device_mesh(
        device.type,
        (layout.pp, layout.dp, layout.tp),
        mesh_dim_names=("pipeline", "data", "tensor"),
    )
    experts = init_device_mesh(
        device.type,
        (layout.pp, layout.expert_replicas, layout.ep, layout.etp),
        mesh_dim_names=("pipeline", "replicas", "expert", "expert_tensor"),
    )
    found: dict[str, dist.ProcessGroup] = {}
    for mesh, names in (
        (dense, ("pipeline", "data", "tensor")),
        (experts, ("replicas", "expert", "expert_tensor")),
    ):
        found |= {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
    if layout.stage_ranks > 1:
        stage = dense["data", "tensor"]._flatten("stage")
        found["stage"] = stage.get_group()
    return found


def host_name() -> str:
    """Name of this host, for run.json."""
    return socket.gethostname()


def encode_words(said: Any) -> str:
    """JSON for the store, which takes text of 8 MB at once: names of many tensors compress well."""
    return base64.b64encode(zlib.compress(json.dumps(said).encode(), level=1)).decode()


def decode_words(content: bytes) -> Any:
    """The inverse of `encode_words`."""
    return json.loads(zlib.decompress(base64.b64decode(content)))


def _befell_a_peer(error: RuntimeError) -> bool:
    """Whether an error of torch says that another rank is gone or late."""
    if isinstance(error, OWN_ERRORS):
        return False
    said = LOST_PEER.search(str(error)) or TRANSPORTS.search(str(error))
    return isinstance(error, dist.DistError) or said is not None


def _what_befell_a_peer(text: str) -> str:
    """What an error of torch.distributed means; its words where they are none of the known ones."""
    found = LOST_PEER.search(text)
    if found and found["left"]:
        return "found that another rank has left"
    if found:
        return f"waited for another rank until its deadline ({DEADLINE})"
    return f"failed ({' '.join(text.split())})"


def _peer_error(what: str) -> TrainError:
    return TrainError("E-PEER", what, REMEDY)
