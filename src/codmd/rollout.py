"""Few-step generation: predict x0, renoise with fresh noise, predict again; for training and inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codmd import flow

Text = TypeVar("Text")
Latents = Float[Tensor, "batch channels frames height width"]
Times = Float[Tensor, " batch"]
Exit = int | Int[Tensor, " batch"] | None


def rollout(
    predict_x0: Callable[[Latents, Times, Text], Latents],
    noise: Latents,
    text: Text,
    steps: Sequence[float],
    renoise: Callable[[int], Latents],
    exit_step: Exit = None,
) -> Latents:
    """x ← G(z, T), the first line of Algorithm 1's loop: the clip that the student makes of `noise`.

    The walk visits the times `steps` and stops at index `exit_step`, whose prediction is x; nothing is
    evaluated beyond it. None is the last index: inference. Only that last call records a gradient, and only
    where the caller has gradients on. `renoise(j)` gives the fresh noise with which step j begins (j ≥ 1).

    `exit_step` may hold one index per sample (R17). A sample then rests at its own exit while the others walk
    on, and one last call, each sample at its own time, makes all of x: the network is called as often as the
    latest exit of the batch asks, with one call that has a gradient.
    """
    y, t = simulate(predict_x0, noise, text, steps, renoise, exit_step)
    return predict_x0(y, t, text)


@torch.no_grad()
def simulate(
    predict_x0: Callable[[Latents, Times, Text], Latents],
    noise: Latents,
    text: Text,
    steps: Sequence[float],
    renoise: Callable[[int], Latents],
    exit_step: Exit = None,
    *,
    latest: int | None = None,
) -> tuple[Latents, Times]:
    """The rollout up to its last call: that call's noisy input and time for each sample.

    `latest` is the latest exit among all ranks, where it isn't this rank's: those of a sharded network have to call
    it equally often.
    """
    exits = torch.as_tensor(len(steps) - 1 if exit_step is None else exit_step).expand(len(noise))
    if not 0 <= int(exits.min()) <= int(exits.max()) < len(steps):
        raise ValueError(f"exit_step: expected indices from 0 to {len(steps) - 1}, got {exits.tolist()}")
    times = torch.tensor(steps, dtype=torch.float32, device=noise.device)
    exits = exits.to(noise.device)
    y = noise
    for j in range(int(exits.max()) if latest is None else latest):
        x = predict_x0(y, times[j].expand(len(y)), text)
        onward = flow.add_noise(x, renoise(j + 1), times[j + 1])
        y = torch.where((exits > j).view(-1, 1, 1, 1, 1), onward, y)
    return y, times[exits]
