"""A dictionary of the things used last, bounded by their bytes; safe for several threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps values until they weigh more than `most_bytes` together; the oldest used leave first.

    `weigh` gives the bytes of a value.
    """

    def __init__(self, most_bytes: int, weigh: Callable[[V], int]) -> None:
        self._most_bytes = most_bytes
        self._weigh = weigh
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: K) -> V | None:
        """The value of `key`, now the newest, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V) -> None:
        """Keeps `value`, and lets the oldest go if it does not fit beside them."""
        weight = self._weigh(value)
        with self._lock:
            self._drop(key)
            self._kept[key] = (value, weight)
            self.size_bytes += weight
            while self.size_bytes > self._most_bytes and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: K) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self.size_bytes -= found[1]
