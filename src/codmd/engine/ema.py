"""A running average of the student's weights, counted in student updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from codmd.networks.sharding import local


@runtime_checkable
class Learning(Protocol):
    """What `networks.WanNetwork` does."""

    def learned(self) -> dict[str, nn.Parameter]: ...


class Ema:
    """average <- decay average + (1 - decay) weights, in fp32 or better; until update `start` it equals the weights.

    The decay is constant; or, with a `power` of gamma > 0, it is (1 - 1/n)^(gamma + 1) at the nth update that counts,
    so that a weight of n updates ago has a share that falls with a power of its age (EDM2's schedule). Averages of
    sharded weights are sharded as they are.
    """

    def __init__(self, network: Learning, decay: float = 0.0, start: int = 0, power: float = 0.0) -> None:
        self.decay, self.start, self.power = decay, start, power
        self.weights = network.learned()
        self.average = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self.weights.items()
        }

    def decay_at(self, updates: int) -> float:
        """The share of the old average at the student's update number `updates`, the first being 1."""
        if updates <= self.start:
            return 0.0
        return (1 - 1 / (updates - self.start)) ** (self.power + 1) if self.power else self.decay

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Takes in the weights after the student's update number `updates`, the first being 1."""
        share = 1 - self.decay_at(updates)
        for name, weight in self.weights.items():
            average = local(self.average[name])
            average.lerp_(local(weight).to(average.dtype), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network with its averaged weights: the two trade places, one tensor after the other."""
        self._trade()
        try:
            yield
        finally:
            self._trade()

    @torch.no_grad()
    def _trade(self) -> None:
        # In place: FSDP keeps its own references to a weight's memory.
        for name, weight in self.weights.items():
            ours, theirs = local(self.average[name]), local(weight)
            held = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(held)
