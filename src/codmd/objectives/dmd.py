"""Distribution matching: move each coordinate of x from the fake network's prediction to the teacher's."""

from __future__ import annotations

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from codmd.flow import at_least_float32
from codmd.objectives.base import Latents, Predictions, Term
from codmd.objectives.config import ObjectiveConfig

NORMALISER_FLOOR = 1e-6
"""Keeps the direction finite where a student has become its teacher. Latents have about unit variance: a real
run, with mean |x - real| of hundredths and more, never meets it (R8)."""


def dmd(predictions: Predictions, config: ObjectiveConfig, group: dist.ProcessGroup | None = None) -> tuple[Term, ...]:
    """L_DMD alone, the baseline."""
    return (Term("dmd", 1.0, dmd_loss(predictions.x, predictions.real, predictions.fake)),)


def dmd_loss(x: Latents, real: Latents, fake: Latents) -> Float[Tensor, " batch"]:
    """The surrogate of Eq. 3, half the *mean* square of x - sg[x - Delta] over each sample (R8).

    The gradient of its mean over samples is Delta divided by the number of elements. Written as
    (x - sg[x]) + Delta, which is the same, a small Delta loses nothing to cancellation.
    """
    delta = dmd_direction(x, real, fake)
    moved = at_least_float32(x) - at_least_float32(x).detach() + delta
    return 0.5 * moved.square().mean(dim=(1, 2, 3, 4))


def dmd_direction(x: Latents, real: Latents, fake: Latents) -> Latents:
    """Delta of Eq. 2 for x0-predictions: (fake - real) / mean|x - real|, the mean over each sample (R7).

    The score difference is (1 - t) / t^2 (fake - real). DMD's weight w_t puts a normaliser of each sample's
    own in the place of that factor, with which a few noise levels would drown the rest. A non-finite
    prediction gives a non-finite direction: to refuse a step is the training guard's business.
    """
    x, real, fake = (at_least_float32(z.detach()) for z in (x, real, fake))
    normaliser = (x - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
    return (fake - real) / normaliser.clamp(min=NORMALISER_FLOOR)
