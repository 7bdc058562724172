"""Latents and videos: a stock `AutoencoderKLWan` with its per-channel normalisation, kept in fp32."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from jaxtyping import Float
from torch import Tensor


class LatentCodec:
    """Encode and decode between videos in [-1, 1] and latents of zero mean and unit deviation a channel."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae.eval().requires_grad_(False)
        shape = (1, -1, 1, 1, 1)
        self.mean = torch.tensor(vae.config.latents_mean).view(shape)
        self.std = torch.tensor(vae.config.latents_std).view(shape)

    @torch.no_grad()
    def encode(self, video: Float[Tensor, "B 3 F H W"]) -> Float[Tensor, "B C f h w"]:
        """The posterior's mode, normalised."""
        latents = self.vae.encode(video).latent_dist.mode()
        return (latents - self.mean.to(latents)) / self.std.to(latents)

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C f h w"], batch: int = 8) -> Float[Tensor, "B 3 F H W"]:
        """Videos in [-1, 1], a few clips at a time to bound memory."""
        parts = latents.to(self.vae.dtype).split(batch)
        return torch.cat([self.vae.decode(p * self.std.to(p) + self.mean.to(p)).sample for p in parts])

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """[C, F, H, W] of the latents of a clip of this size."""
        config = self.vae.config
        time, space = config.scale_factor_temporal, config.scale_factor_spatial
        return config.z_dim, (frames - 1) // time + 1, height // space, width // space
