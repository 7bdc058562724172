"""The probability path of a rectified flow: noising, and how x0, velocity and score follow from each other.

With data ``x0``, noise ``eps`` and time ``t`` in [0, 1]::

    x_t = (1 - t) x0 + t eps       v = eps - x0       x0 = x_t - t v       score = -(x_t - (1 - t) x0) / t^2

The paper writes a diffusion with alpha_t and sigma_t; here alpha_t = 1 - t and sigma_t = t (docs/paper.md,
R18). Everything is computed in float32 or better, whatever the precision of the networks: at t = 0.02 a
bfloat16 subtraction would lose most of the digits. ``t`` is a number, a scalar tensor, or one time a sample.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from codmd.errors import UserError

Time = float | Float[Tensor, ""] | Float[Tensor, " batch"]
Samples = Float[Tensor, "batch *dims"]
NumberOrTensor = TypeVar("NumberOrTensor", float, Tensor)

WAN_1_3B_STEPS = (1.0, 0.9, 0.757, 0.522)
"""The step list of the 1.3B student: chosen by hand by its authors, not a shifted uniform grid (R10)."""


def add_noise(x0: Samples, eps: Samples, t: Time) -> Samples:
    """x_t = (1 - t) x0 + t eps, the forward diffusion of Algorithm 1."""
    x0, eps = at_least_float32(x0), at_least_float32(eps)
    t = _per_sample(t, x0)
    return (1 - t) * x0 + t * eps


def velocity(x0: Samples, eps: Samples) -> Samples:
    """v = dx_t/dt = eps - x0: what a flow network is trained to predict."""
    return at_least_float32(eps) - at_least_float32(x0)


def x0_from_velocity(x_t: Samples, v: Samples, t: Time) -> Samples:
    """x0 = x_t - t v."""
    x_t, v = at_least_float32(x_t), at_least_float32(v)
    return x_t - _per_sample(t, x_t) * v


def velocity_from_x0(x_t: Samples, x0: Samples, t: Time) -> Samples:
    """v = (x_t - x0) / t, for t > 0."""
    x_t, x0 = at_least_float32(x_t), at_least_float32(x0)
    return (x_t - x0) / _per_sample(t, x_t)


def score_from_x0(x_t: Samples, x0: Samples, t: Time) -> Samples:
    """s = -(x_t - alpha_t x0) / sigma_t^2, the paper's score of a denoiser (notation table), for t > 0."""
    x_t, x0 = at_least_float32(x_t), at_least_float32(x0)
    t = _per_sample(t, x_t)
    return -(x_t - (1 - t) * x0) / t.square()


def x0_from_score(x_t: Samples, score: Samples, t: Time) -> Samples:
    """x0 = (x_t + t^2 s) / (1 - t), for t < 1: at t = 1 the noisy sample says nothing about x0."""
    x_t, score = at_least_float32(x_t), at_least_float32(score)
    t = _per_sample(t, x_t)
    return (x_t + t.square() * score) / (1 - t)


def guide(uncond: Samples, cond: Samples, w: float) -> Samples:
    """Classifier-free guidance in the standard convention, u + w (c - u) (R6).

    w = 1 is no guidance. Some releases write c + g (c - u) instead: the same figure there means w = 1 + g.
    """
    uncond, cond = at_least_float32(uncond), at_least_float32(cond)
    return uncond + w * (cond - uncond)


def shift(u: NumberOrTensor, k: float) -> NumberOrTensor:
    """sh_k(u) = k u / (1 + (k - 1) u): moves times towards noise for k > 1 and keeps 0 and 1."""
    if not k > 0:
        raise UserError(f"time shift must be above 0, got {k}: 1 means no shift, Wan uses 5 or 8")
    if isinstance(u, Tensor):
        u = at_least_float32(u)
    return k * u / (1 + (k - 1) * u)


_shifted = shift  # `renoise_times` calls its argument `shift`


def renoise_times(
    u: Float[Tensor, "*dims"], shift: float, low: float = 0.02, high: float = 0.98
) -> Float[Tensor, "*dims"]:
    """Times at which teacher and fake look at x: uniform draws ``u``, shifted, and only then clamped (R9)."""
    return _shifted(u, shift).clamp(low, high)


def shifted_steps(k: float, n: int) -> tuple[float, ...]:
    """The sampling times sh_k(1), ..., sh_k(1/n): 1, 0.9375, 0.8333, 0.625 for k = 5 and n = 4 (R10)."""
    if n < 1:
        raise UserError(f"a step list needs at least 1 step, got {n}")
    return tuple(shift(i / n, k) for i in range(n, 0, -1))


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if that is what it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_sample(t: Time, like: Tensor) -> Tensor:
    """``t`` in the shape and precision in which it multiplies ``like``."""
    t = torch.as_tensor(t, dtype=like.dtype, device=like.device)
    return t.reshape(t.shape + (1,) * (like.ndim - t.ndim)) if t.ndim else t
