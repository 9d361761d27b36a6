"""Small messages between hosts before an exchange: who is there, what it sends, who is missing.

Each rank sends every peer one row of integers over gloo and waits for theirs with a deadline of the
group, one after another. A peer that is late or gone is known by its number before any collective
could hang on it; a message that is of another exchange shows that ranks disagree.
"""

import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_kernels.rdep.failures import Place, gone, late, out_of_order
from nmoe_kernels.rdep.transports.contract import Shape

# Keeps these messages apart from a caller's own on the same group.
TAG = 47_110
# How long, past the deadline, for those that wait in vain to find each other.
ROLL_CALL_S = 5.0


class Announcements:
    """The announcements of one group: `exchange` once per epoch, on every rank."""

    def __init__(self, shape: Shape, settings_text: str, group: dist.ProcessGroup) -> None:
        self._deadline_s = shape.deadline_s
        self.wait_s_R = torch.zeros(shape.ranks, dtype=torch.float64)
        self.job_ranks: list[int] = dist.get_process_group_ranks(group)
        self._peers = [peer for peer in range(shape.ranks) if peer != shape.rank]
        self._agreed = zlib.crc32(repr((*shape.sizes, settings_text)).encode())
        self._group = group

    def exchange(self, place: Place, sent_RC: Tensor) -> Tensor:
        """Row r of int64 `sent` [R, C] goes to rank r; gives what each rank sent here, [R, C].

        Raises KernelError: E-RDEP-LATE, E-RDEP-PEER, E-RDEP-ORDER.
        """
        head = torch.tensor([zlib.crc32(str(place).encode()), self._agreed])
        messages = torch.cat([head.expand(sent_RC.shape[0], -1), sent_RC], dim=1)
        received = messages.clone()
        missing, left = self._trade(received, messages, TAG, self._deadline_s)
        if left:
            raise gone(left, place)
        if missing:
            raise late(missing, place, self._deadline_s)
        wrong = (received[:, :2] != head).any(1).nonzero().flatten().tolist()
        if wrong:
            raise out_of_order(self.job_ranks[wrong[0]], place)
        return received[:, 2:]

    def failed(self, place: Place, failure: RuntimeError) -> Exception:
        """What a collective's failure means: peers that have left, or that stand still in it.

        Who has failed alike answers a roll call; the others are named.
        """
        nothing_R1 = torch.zeros(len(self.job_ranks), 1)
        missing, left = self._trade(nothing_R1.clone(), nothing_R1, TAG + 1, ROLL_CALL_S)
        everyone = [self.job_ranks[peer] for peer in self._peers]
        if _is_timeout(failure):
            return late(missing or everyone, place, self._deadline_s)
        return gone(left or everyone, place)

    def _trade(
        self, received: Tensor, messages: Tensor, tag: int, limit_s: float
    ) -> tuple[list[int], list[int]]:
        """Swaps rows with every peer; gives who did not answer in time, and who has left."""
        ends = time.monotonic() + limit_s
        works: list[tuple[int, dist.Work]] = []
        missing: set[int] = set()
        left: set[int] = set()
        for peer in self._peers:
            try:
                receive = dist.irecv(received[peer], group_src=peer, group=self._group, tag=tag)
                send = dist.isend(messages[peer], group_dst=peer, group=self._group, tag=tag)
            except RuntimeError:
                left.add(self.job_ranks[peer])
                continue
            assert receive is not None
            assert send is not None
            works += [(peer, receive), (peer, send)]
        for peer, work in works:
            begun = time.monotonic()
            # Once a peer is known to have left, there is no use in waiting for another.
            remaining = 0.0 if left else ends - begun
            try:
                work.wait(timedelta(seconds=max(remaining, 1e-3)))
            except RuntimeError as failure:
                (missing if _is_timeout(failure) else left).add(self.job_ranks[peer])
            self.wait_s_R[peer] += time.monotonic() - begun
        return sorted(missing), sorted(left)


def carries_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for tensors of the CPU, which announcements need."""
    return "cpu:gloo" in dist.get_backend_config(group)


def _is_timeout(failure: RuntimeError) -> bool:
    """Whether gloo gave up for lack of time, in this wait or in one beside it."""
    return any(words in str(failure).lower() for words in ("timed out", "timeout"))
