"""Named sources of randomness, all derived from one seed.

Each use of chance has its own generator, named by what it is for and by the stage it serves. So one use
never shifts another, a stage starts from the same numbers whether or not the run was interrupted
before it, and evaluation, which draws from no training generator, cannot change a result.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Torch's global generator is one for all threads.
_GLOBAL_GENERATOR = threading.RLock()


@dataclass(frozen=True)
class Randomness:
    """The seed of a run and the generators derived from it."""

    seed: int

    def derive(self, *name: str | int) -> int:
        """A 63-bit seed for the use called ``name``."""
        digest = hashlib.blake2b(repr((self.seed, *name)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(self, *name: str | int, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh generator for the use called ``name``."""
        return torch.Generator(device=device).manual_seed(self.derive(*name))

    @contextmanager
    def scope(self, *name: str | int) -> Iterator[None]:
        """Seeds torch's global CPU generator inside the block and puts it back afterwards.

        For code that cannot be handed a generator, such as the initialisation of library modules. Of several threads
        one at a time is inside.
        """
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.derive(*name))
            yield
