"""Random numbers keyed by what they are for: (seed, step, global sample id, purpose), never by rank or order.

Every draw has a generator of its own, made from its key. So a sample meets the same noise whichever samples
share its batch, on any number of ranks, at any accumulation, and after any resume: there is no state to save.

The global sample id counts samples through the whole run: iteration ``step`` of a run with a global batch of
``B`` makes the samples ``step * B, ..., step * B + B - 1``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Key = int | str


def keyed_generator(seed: int, *key: Key) -> torch.Generator:
    """A CPU generator whose stream is a function of the key alone."""
    # repr keeps 1 apart from "1", and ("a", "b") apart from ("ab",).
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def sample_ids(step: int, batch: int) -> tuple[int, ...]:
    """The global ids of the samples of one iteration."""
    return tuple(range(step * batch, (step + 1) * batch))


def sample_noise(
    seed: int, step: int, ids: Sequence[int], shape: Sequence[int], purpose: str
) -> Float[Tensor, "batch *dims"]:
    """Standard normal noise of this shape for each sample."""
    return torch.stack([torch.randn(*shape, generator=keyed_generator(seed, purpose, step, i)) for i in ids])


def sample_uniform(seed: int, step: int, ids: Sequence[int], purpose: str) -> Float[Tensor, " batch"]:
    """One draw from U(0, 1) for each sample."""
    return torch.cat([torch.rand(1, generator=keyed_generator(seed, purpose, step, i)) for i in ids])


def shared_uniform(seed: int, step: int, ids: Sequence[int], purpose: str) -> Float[Tensor, " batch"]:
    """One draw from U(0, 1) for the whole global batch, repeated for each sample."""
    return torch.rand(1, generator=keyed_generator(seed, purpose, step)).repeat(len(ids))


def prompt_indices(seed: int, ids: Sequence[int], count: int) -> list[int]:
    """Which prompt each sample gets: every prompt once an epoch, in an order that is new in each epoch."""
    orders: dict[int, list[int]] = {}
    chosen = []
    for i in ids:
        epoch, place = divmod(i, count)
        if epoch not in orders:
            orders[epoch] = torch.randperm(count, generator=keyed_generator(seed, "order", epoch)).tolist()
        chosen.append(orders[epoch][place])
    return chosen


@dataclass(frozen=True)
class Draws:
    """The random numbers of one iteration, on the device that wants them."""

    seed: int
    step: int
    ids: tuple[int, ...]
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype = torch.float32

    def noise(self, purpose: str) -> Float[Tensor, "batch *dims"]:
        return sample_noise(self.seed, self.step, self.ids, self.shape, purpose).to(self.device, self.dtype)

    def uniform(self, purpose: str, *, shared: bool = False) -> Float[Tensor, " batch"]:
        draw = shared_uniform if shared else sample_uniform
        return draw(self.seed, self.step, self.ids, purpose).to(self.device)

    def exits(self, count: int, *, shared: bool) -> Int[Tensor, " batch"]:
        """The rollout's exit for each sample, of `count` equally likely ones (R17)."""
        return (self.uniform("exit", shared=shared) * count).long().clamp(max=count - 1)
