"""Peak memory of a step, counted allocation by allocation.

A process's resident size depends on what the C allocator gives back and when; the profiler instead hears of every
tensor's storage as it comes and goes, so that the peak is exact, the same each time, and free of whatever else the
machine does. What is alive before the step (weights, buffers, moments) is counted by walking it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from codmd.engine.loop import Trainer


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes that are there all the time, and the most that a step has beyond them."""

    standing: int
    step: int

    @property
    def total(self) -> int:
        return self.standing + self.step


def peak(one: Trainer) -> Peak:
    """The peak of an iteration in which the student learns, once the optimizers have their moments."""
    every = one.recipe.train.student_every
    for step in (0, 1):
        one.step = step
        one.iterate()
    one.step = every
    standing = _bytes(_tensors(one))
    with profile(use_kineto=True, profile_memory=True) as watched:
        one.iterate()
    events = sorted(
        (event for event in watched.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    if not events:
        raise RuntimeError("the profiler reported no allocation: this build of torch cannot count memory")
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return Peak(standing=standing, step=most)


def _tensors(one: Trainer) -> Iterable[Tensor]:
    for network in (one.roles.student, one.roles.fake, one.roles.teacher.network):
        yield from network.parameters()
        yield from network.buffers()
    for learner in (one.student, one.fake):
        for state in learner.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once, however many tensors share it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
