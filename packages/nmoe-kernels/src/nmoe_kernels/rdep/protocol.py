"""When a one-sided transport may write, what it awaits, and what its flags say.

An exchange (a dispatch, a return, forward or backward) is one epoch, numbered 1, 2, ... alike on
every rank. Every rank owns, for each peer, a segment in two receive areas, a count row for each
area, and two flags that only that peer writes: `announced` and `delivered`. Flags start at 0, take
the epoch's number, never fall, and are released by the writer and acquired by the reader, at system
scope. In epoch e a rank goes through `PHASES` in order:

1. announce: for each peer, put the count row of area(e), then release `announced` = e.
2. put: for each peer whose last read of area(e) is acknowledged, store the rows there, then release
   `delivered` = e, also when there are no rows.
3. collect: for each peer, await `announced` >= e and read its counts, await `delivered` >= e and
   read its rows.

An announcement comes after the collecting of every earlier epoch, so its number acknowledges them:
`announced` = a says that the areas of all epochs before a have been read. Epoch e overwrites what
epoch e - AREAS left, so that a peer must have announced e - AREAS + 1 before anything of e, counts
or rows, is put into its memory. A rank that has collected epoch e - 1 has seen that already: with
two areas the check costs no wait.

A transport that puts rows without knowing its peers' counts needs no announcement of its own: with
"put" only after "collect" of the epoch before, `delivered` says all that `announced` would.

A rank that pulls instead of pushing follows the same rules with the roles of the areas turned: the
rows lie in the writer's own area, and it overwrites them when all peers have acknowledged.
"""

from dataclasses import dataclass

AREAS = 2
"""Receive areas of a rank: while one is read, peers write the other."""

PHASES = ("announce", "put", "collect")
"""What a rank does in an epoch, in this order."""


@dataclass(frozen=True)
class Epoch:
    """One exchange; `number` counts from 1 and is the value that its flags take."""

    number: int

    @property
    def area(self) -> int:
        """Which area (and which count row) of the receivers this epoch is written to."""
        return self.number % AREAS

    @property
    def needs_announced(self) -> int:
        """What a peer must have announced before counts or rows go into its memory."""
        return self.number - AREAS + 1

    def may_write(self, announced: int) -> bool:
        """Whether a peer with this flag `announced` has read what the epoch overwrites."""
        return announced >= self.needs_announced

    def has_counts(self, announced: int) -> bool:
        """Whether a peer's count row of this epoch may be read."""
        return announced >= self.number

    def has_rows(self, delivered: int) -> bool:
        """Whether a peer's rows of this epoch may be read."""
        return delivered >= self.number

    def following(self) -> "Epoch":
        """The epoch after this one."""
        return Epoch(self.number + 1)
