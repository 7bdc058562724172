"""Wan's transformer as this package sees it: noisy latents, a time in [0, 1] and a prompt in, a velocity out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diffusers import WanTransformer3DModel
from jaxtyping import Float
from torch import Tensor, nn

from codmd.flow import x0_from_velocity
from codmd.networks.precision import Precision, arithmetic
from codmd.networks.sharding import whole
from codmd.networks.text import FoldedPadding, TextCondition

NETWORK_TIME = 1000.0  # Wan's time runs from 0 to 1000


class WanNetwork(nn.Module):
    """A stock `WanTransformer3DModel` in one of the roles: student, teacher or fake.

    `precision` is the arithmetic of its calls, see `networks.precision`; its weights keep theirs.
    """

    precision: Precision = "fp32"

    def __init__(self, transformer: WanTransformer3DModel) -> None:
        super().__init__()
        self.transformer = transformer
        self._padding = FoldedPadding()
        for block in transformer.blocks:
            block.attn2.set_processor(self._padding)

    def forward(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """Velocity v = eps - x0 at x_t."""
        self._padding.bias = text.key_bias()
        with arithmetic(self.precision, x_t.device):
            return self.transformer(
                hidden_states=x_t, timestep=t * NETWORK_TIME, encoder_hidden_states=text.tokens, return_dict=False
            )[0]

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, by the names that they have in a checkpoint."""
        return {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

    def stock_names(self) -> list[str]:
        """The names of a stock transformer's tensors, which `stock_state` gives."""
        return list(self.stock_sizes())

    def stock_sizes(self) -> dict[str, int]:
        """Bytes of each tensor that `stock_state` gives."""
        return {name: t.numel() * t.element_size() for name, t in self.transformer.state_dict().items()}

    def stock_state(self) -> Iterator[tuple[str, Tensor]]:
        """A stock transformer's weights, one whole tensor after the other; every rank has to take part."""
        for name, tensor in self.transformer.state_dict().items():
            yield name, whole(tensor.detach())

    def remember(self) -> Callable[[], None]:
        """What brings back the state of the current call, for whoever recomputes a part of it later."""
        padding, bias = self._padding, self._padding.bias

        def restore() -> None:
            padding.bias = bias

        return restore

    def velocity(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """Velocity v = eps - x0 at x_t."""
        return self(x_t, t, text)

    def x0(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """The clean sample that the velocity points to, x0 = x_t - t v, in fp32."""
        return x0_from_velocity(x_t, self(x_t, t, text), t)
