"""Named, counted random numbers: every draw is a function of (seed, purpose, counters) alone.

No global stream exists, so a number does not depend on what was drawn before it, on the number of
ranks, or on where a run was resumed.
"""

import hashlib

import torch


def random_key(seed: int, *purpose: str | int) -> int:
    """A 63-bit key from a seed and the words and counters that name the purpose."""
    name = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A fresh CPU generator for one purpose, such as `generator(seed, "init", name, expert)`."""
    return torch.Generator().manual_seed(random_key(seed, *purpose))
