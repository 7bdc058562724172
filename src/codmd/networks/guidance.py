"""The guided teacher: classifier-free guidance in the standard convention, u + w (c - u) (reading R6)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from codmd.flow import guide, x0_from_velocity
from codmd.networks.text import TextCondition
from codmd.networks.wan import WanNetwork


class GuidedTeacher:
    """A network that answers with its guided prediction; both branches go through it as one batch of 2B."""

    def __init__(self, network: WanNetwork, negative: TextCondition, scale: float) -> None:
        self.network, self.negative, self.scale = network, negative, scale

    def velocity(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """Guided velocity. At scale 1 the negative branch has no weight and is not evaluated."""
        if self.scale == 1.0:
            return self.network.velocity(x_t, t, text)
        both = TextCondition.cat([text, self.negative.expand(len(text))])
        cond, uncond = self.network.velocity(torch.cat([x_t, x_t]), torch.cat([t, t]), both).chunk(2)
        return guide(uncond, cond, self.scale)

    def x0(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """Guided prediction of the clean sample."""
        return x0_from_velocity(x_t, self.velocity(x_t, t, text), t)
