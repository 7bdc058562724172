"""A network that learns: its optimizer, its warm-up, its clipping, its count of updates."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from codmd.config import TrainConfig
from codmd.networks import WanNetwork
from codmd.networks.sharding import whole


class Learner:
    """Gradients and update are apart, so that a guard can stand between them."""

    def __init__(self, network: WanNetwork, lr: float, config: TrainConfig) -> None:
        self.network, self.lr, self.config, self.updates = network, lr, config, 0
        self.names = list(network.learned())
        self.parameters = list(network.learned().values())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def clip(self) -> Float[Tensor, ""]:
        """Clips the gradients; their norm before that, over all ranks."""
        return whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm))

    @property
    def rate(self) -> float:
        """The learning rate of the next update: it rises over the warm-up, then stays."""
        return self.lr * min(1.0, (self.updates + 1) / max(self.config.warmup, 1))

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.step()
        self.updates += 1
        self.discard()

    def discard(self) -> None:
        """Forgets the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
