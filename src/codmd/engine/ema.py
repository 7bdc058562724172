"""A running average of the student's weights, counted in student updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """average <- decay average + (1 - decay) weights, in fp32; until update `start` it equals the weights."""

    def __init__(self, network: nn.Module, decay: float, start: int = 0) -> None:
        self.decay, self.start = decay, start
        self.weights = dict(network.named_parameters())
        self.average = {name: weight.detach().float().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Takes in the weights after the student's update number `updates`, the first being 1."""
        share = 1.0 if updates <= self.start else 1 - self.decay
        for name, weight in self.weights.items():
            self.average[name].lerp_(weight.float(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network with its averaged weights: the two trade places, nothing is copied."""
        self._trade()
        try:
            yield
        finally:
            self._trade()

    def _trade(self) -> None:
        for name, weight in self.weights.items():
            weight.data, self.average[name] = self.average[name], weight.data
