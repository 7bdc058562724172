"""What the miniature's transformer must know of a noisy clip: where each object of the caption is.

Wan's transformer has no absolute positions: noise and attention with relative phases are all that tells left from
right. So "a red circle left of a blue square" takes several steps of thought: which patches may be red, which blue,
and which of them have the others on their right. What flow matching says of that drowns in what it says of all the
pixels, so that the transformer is also asked outright: of all patches of a frame, which holds the middle of the
caption's first object, and which that of its second?
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from codmd.mini.world import SIZE, Scene, camera_path, object_path
from codmd.networks import WanNetwork

PATCHES = 4  # of the transformer, along a side of a frame
LATENT_FRAMES, STRIDE, LAST = 9, 2, 16  # a latent frame stands for STRIDE frames, but the first for one
NOT_ASKED = -100


def places(scene: Scene, said: bool) -> Int[Tensor, "frames objects"]:
    """The patch that holds each object's middle in each latent frame; `NOT_ASKED` of an object that isn't there,
    and of all where nothing was said."""
    found = torch.full((LATENT_FRAMES, 2), NOT_ASKED)
    middle = np.maximum(STRIDE * np.arange(LATENT_FRAMES) - (STRIDE - 1) / 2, 0.0) / LAST
    shift, zoom = camera_path(scene.camera, middle)
    for number, thing in enumerate(scene.things if said else ()):
        x, y, *_ = object_path(scene, thing, middle)
        across, down = zoom * (x - SIZE / 2) + SIZE / 2 - shift, zoom * (y - SIZE / 2) + SIZE / 2
        column, row = ((PATCHES * v / SIZE).astype(int).clip(0, PATCHES - 1) for v in (across, down))
        found[:, number] = torch.from_numpy(PATCHES * row + column)
    return found


class Layout(nn.Module):
    """Asks what lies in a transformer between its last blocks; used in training alone."""

    def __init__(self, network: WanNetwork) -> None:
        super().__init__()
        transformer = network.transformer
        self.head = nn.Linear(transformer.config.num_attention_heads * transformer.config.attention_head_dim, 2)
        self.seen: Tensor | None = None
        transformer.blocks[-2].register_forward_hook(self._look)

    def _look(self, block: nn.Module, given: Any, hidden: Tensor) -> None:
        self.seen = hidden

    def forward(self, right: Int[Tensor, "B frames 2"]) -> Float[Tensor, ""]:
        """The mean cross-entropy of the objects' places, from what the network's last call left."""
        assert self.seen is not None
        each = self.head(self.seen).float().unflatten(1, (-1, PATCHES**2))  # [B, F, P, 2]
        self.seen = None
        wrong = nn.functional.cross_entropy(each.permute(0, 2, 1, 3), right, reduction="sum")
        return wrong / (right != NOT_ASKED).sum().clamp(min=1)
