"""How the fake network learns what the student makes."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from codmd.flow import velocity as flow_velocity
from codmd.objectives.base import Latents


def flow_mse(velocity: Latents, x0: Latents, eps: Latents) -> Float[Tensor, " batch"]:
    """mean|v - (eps - x0)|^2 over each sample: Algorithm 1's denoising loss, divided by t^2 (R14).

    ``x0`` is the student's own sample, detached here (R15); ``velocity`` is unguided, as eps and x0 made x_t.
    """
    return (velocity - flow_velocity(x0, eps).detach()).square().mean(dim=(1, 2, 3, 4))
