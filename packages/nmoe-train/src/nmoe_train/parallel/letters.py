"""What ranks tell each other from a background thread, where none may wait in a collective.

A rank leaves words in the run's key-value store and asks for those of others again and again, so
that the wait can be called off at any time and costs the training nothing. The two ways of acting
together are those of `Groups`; they differ in that a rank which has acted goes on at once, and only
who needs the words of another waits for them.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from nmoe_train.parallel.groups import Groups, RankFailed, decode_words, encode_words

Result = TypeVar("Result")

FAILED = "failed"
POLL_S = 0.01


class CalledOff(Exception):
    """The undertaking was called off: nothing may be done for it any more."""


class Letters:
    """The letters of one undertaking, named `topic`, in which every rank of `groups` takes part."""

    def __init__(self, groups: Groups, topic: str) -> None:
        self.layout, self.first = groups.layout, groups.first
        self._groups = groups
        self._off, self._acting = False, threading.Lock()
        store = groups.store
        self._store: Store | None = None if store is None else PrefixStore(topic, store)
        self._talks = 0
        self._left: list[str] = []

    def first_does(self, action: Callable[[], Result]) -> Result:
        """Rank 0 acts and goes on; the others wait for its result, which JSON must hold.

        An exception of rank 0 is raised there, and as RankFailed on the others.
        """
        self._talks += 1
        if not self.first:
            result: Result = self._await(f"{self._talks}/0")
            return result
        with self._acting:
            return self._act(action)

    def all_do(self, action: Callable[[], Result]) -> list[Result]:
        """Every rank acts; rank 0 waits for all and gets the results, which JSON must hold.

        The other ranks get an empty list at once. An exception of one rank is raised there, and as
        RankFailed on the others, where they wait next.
        """
        self._talks += 1
        own = self._act(action)
        if not self.first:
            return []
        return [own, *(self._await(f"{self._talks}/{r}") for r in range(1, self.layout.ranks))]

    def guard(self) -> None:
        """Before this rank acts and while it waits: raises where it may no longer act for all."""
        if self._off:
            raise CalledOff
        self._groups.guard()

    def call_off(self) -> None:
        """For any thread: once this returns, rank 0 no longer acts for all and nobody waits."""
        self._off = True
        with self._acting:
            pass

    def forget(self) -> None:
        """Takes this rank's letters back, once no other rank can want them."""
        if self._store is not None:
            for key in self._left:
                self._store.delete_key(key)
        self._left = []

    def _act(self, action: Callable[[], Result]) -> Result:
        self.guard()
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must hear
            self._tell_failure(error)
            raise
        self._leave(f"{self._talks}/{self.layout.rank}", result)
        return result

    def _tell_failure(self, error: Exception) -> None:
        """Tells the others, unless one of them failed before: then this follows from that."""
        if self._store is None:
            return
        self._raise_failure_of_another()
        words = " ".join(str(error).split()) or repr(error)
        # Without the store nobody can be told, and the error itself matters more.
        with contextlib.suppress(RuntimeError):
            self._groups.fail()
            self._leave(FAILED, [self.layout.rank, words])

    def _leave(self, key: str, words: Any) -> None:
        if self._store is not None:
            self._store.set(key, encode_words(words))
            self._left.append(key)

    def _await(self, key: str) -> Any:
        assert self._store is not None
        while not self._store.check([key]):
            self._raise_failure_of_another()
            self.guard()
            time.sleep(POLL_S)
        return decode_words(self._store.get(key))

    def _raise_failure_of_another(self) -> None:
        assert self._store is not None
        if self._store.check([FAILED]):
            rank, words = decode_words(self._store.get(FAILED))
            if rank != self.layout.rank:
                raise RankFailed(f"rank {rank} failed: {words}")
