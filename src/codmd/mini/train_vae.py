"""Training the miniature's video autoencoder, a stock `AutoencoderKLWan` made small.

Trained on crops of rendered clips through the *unclamped* output (the stock decode ends in a clamp that kills
gradients), with a faint KL term that keeps the latents smooth enough to be modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.utils.data import Dataset

from codmd.mini.captions import sample_prior
from codmd.mini.gradients import Gradients
from codmd.mini.progress import SAY_EVERY, TrainingState, in_order, progress, whole_folder
from codmd.mini.world import FRAMES, SIZE, object_path, render, sample_scene

LATENT_CHANNELS = 16
KL_WEIGHT, SQUARE_WEIGHT = 1e-4, 2.0
STATISTICS_CLIPS = 64
DECODER_STEPS, DECODER_BATCH = 2500, (8, FRAMES, SIZE // 2)
SAVE_EVERY = 500  # steps
EDGE_WEIGHT = 4.0  # how much more a pixel counts where something moves or ends

# Rounds of the training; each is a list of (steps, (clips, frames, size) of a batch) under one cosine of the rate.
# Short small crops teach the spatial code, long ones the memory over a whole clip, whole frames the borders.
ROUNDS = (
    ((4500, (16, 5, 32)), (800, (4, 9, 64))),
    ((1500, (8, 17, 32)), (300, (4, 17, 64))),
)


def new_vae() -> AutoencoderKLWan:
    """Wan2.1's autoencoder at a twelfth of its width: x8 in space, x2 in time, 17 frames to 9 latent frames."""
    return AutoencoderKLWan(
        base_dim=8, z_dim=LATENT_CHANNELS, dim_mult=[1, 2, 4, 8], num_res_blocks=1, attn_scales=[],
        temperal_downsample=[False, False, True], latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS, scale_factor_temporal=2, scale_factor_spatial=8,
    )  # fmt: skip


@torch.no_grad()
def initialise(vae: AutoencoderKLWan) -> None:
    """Start as a nearly linear autoencoder: residual branches silent, the trunk orthogonal.

    With the stock initialisation a net this narrow drowns its input in biases and stays on a plateau, putting out
    the mean colour, for thousands of steps.
    """
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv3d | nn.Conv2d):
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Conv3d) and name.endswith(("conv_in", "conv_out", "conv_shortcut", "quant_conv")):
            nn.init.zeros_(module.weight)  # only the present frame counts at first
            module.weight[:, :, -1] = nn.init.orthogonal_(torch.empty_like(module.weight[:, :, -1]))
        elif "resample.1" in name:
            nn.init.orthogonal_(module.weight, gain=math.sqrt(2))
        elif name.endswith(("conv2", "proj")):
            nn.init.zeros_(module.weight)
    deviation = vae.quant_conv.weight.shape[0] // 2
    nn.init.zeros_(vae.quant_conv.weight[deviation:])
    nn.init.constant_(vae.quant_conv.bias[deviation:], -4.0)  # log-variance: latents begin almost noiseless


def decode_unclamped(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """What `vae.decode` computes, without its final clamp to [-1, 1]."""
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    chunks = []
    for i in range(x.shape[2]):
        vae._conv_idx = [0]
        chunk = x[:, :, i : i + 1]
        chunks.append(vae.decoder(chunk, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0))
    vae.clear_cache()
    return torch.cat(chunks, 2)


class Crops(Dataset[Tensor]):
    """Batches `[B, 3, frames, size, size]` of crops around objects; batch n depends on (seed, n, shape) alone."""

    def __init__(self, seed: int, shape_at: Callable[[int], tuple[int, int, int]]) -> None:
        self.seed, self.shape_at = seed, shape_at

    def __getitem__(self, step: int) -> Tensor:
        batch, frames, size = self.shape_at(step)
        rng = np.random.default_rng((self.seed, step, frames))
        out: list[np.ndarray] = []
        while len(out) < batch:
            scene = sample_scene(sample_prior(rng), rng)
            clip = render(scene)
            for _ in range(min(2, batch - len(out))):  # rendering is dear: two crops of each clip
                first = int(rng.integers(0, FRAMES - frames + 1))
                thing = scene.things[int(rng.integers(len(scene.things)))]
                x, y, _, _ = object_path(scene, thing, np.array([first / (FRAMES - 1)]))
                jitter = rng.uniform(-size / 2, size / 2, 2)
                left, top = (int(np.clip(c - size / 2, 0, SIZE - size)) for c in (x[0] + jitter[0], y[0] + jitter[1]))
                out.append(clip[first : first + frames, top : top + size, left : left + size])
        return torch.from_numpy(np.stack(out)).permute(0, 4, 1, 2, 3).contiguous()


def reconstruction_loss(video: Tensor, target: Tensor) -> Tensor:
    """L1, with more weight near edges in space and changes in time."""
    with torch.no_grad():
        edge = torch.zeros_like(target[:, :1])
        for dim in (2, 3, 4):
            if target.shape[dim] > 1:
                step = target.diff(dim=dim).abs().amax(1, keepdim=True)
                pad = [0, 0] * (4 - dim) + [1, 0]
                edge = torch.maximum(edge, nn.functional.pad(step, pad))
        weight = 1 + EDGE_WEIGHT * nn.functional.max_pool3d(edge.clamp(max=1.0), (1, 3, 3), 1, (0, 1, 1))
    return (weight * (video - target).abs()).mean()


def schedule(step: int) -> tuple[float, tuple[int, int, int]]:
    """The rate's factor and the shape of the batch at a step of the whole training."""
    for stages in ROUNDS:
        length = sum(steps for steps, _ in stages)
        if step < length:
            factor = min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / length))
            for steps, shape in stages:
                if step < steps:
                    return factor, shape
                step -= steps
        step -= length
    raise ValueError("step lies beyond the last round")


def train_vae(out: Path, *, seed: int, device: torch.device, rate: float = 1e-3) -> AutoencoderKLWan:
    """Train (or go on training) and save the autoencoder with its latents' statistics under `out`."""
    torch.manual_seed(seed)
    vae = new_vae()
    initialise(vae)
    vae.to(device)
    for module in vae.modules():
        if device.type == "cpu" and isinstance(module, nn.Conv3d | nn.Conv2d):  # a third faster there
            layout = torch.channels_last_3d if isinstance(module, nn.Conv3d) else torch.channels_last
            module.weight.data = module.weight.data.contiguous(memory_format=layout)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    state = TrainingState(out / "vae-training", {"vae": vae}, {"adamw": optimizer})
    start, total = state.resume(), sum(steps for stages in ROUNDS for steps, _ in stages)
    data = in_order(Crops(seed, lambda step: schedule(step)[1]), start, total, device)

    def loss(target: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(target).latent_dist
        video = decode_unclamped(vae, posterior.mean + posterior.std * noise)
        error = reconstruction_loss(video, target)
        kl = posterior.kl().mean() / noise[0].numel()
        return error + SQUARE_WEIGHT * (video - target).square().mean() + KL_WEIGHT * kl, error

    gradients = Gradients(loss, list(vae.parameters()), device)
    for step, bar in progress("autoencoder", start, total):
        optimizer.param_groups[0]["lr"] = rate * schedule(step)[0]
        batch, frames, size = schedule(step)[1]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        shape = (batch, LATENT_CHANNELS, (frames - 1) // 2 + 1, size // 8, size // 8)
        error = gradients(next(data), torch.randn(shape, generator=generator).to(device))
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % SAY_EVERY == 0:
            bar(f"weighted L1 {error.item():.4f}")
        state.save_every(SAVE_EVERY, step + 1, total)

    _set_statistics(vae, seed)
    with whole_folder(out / "vae") as folder:
        vae.save_pretrained(folder)
    return vae


def sharpen_decoder(
    out: Path, vae: AutoencoderKLWan, *, seed: int, device: torch.device, rate: float = 1e-3
) -> AutoencoderKLWan:
    """Train (or go on training) the decoder alone on whole-length crops, and save the autoencoder anew.

    Latents stay what they are, so this may come after the transformer has learned them.
    """
    vae.to(device).train().requires_grad_(False)
    learned = nn.ModuleDict({"post_quant_conv": vae.post_quant_conv, "decoder": vae.decoder}).requires_grad_(True)
    optimizer = torch.optim.AdamW(learned.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    state = TrainingState(out / "decoder-training", {"decoder": learned}, {"adamw": optimizer})
    start = state.resume()
    data = in_order(Crops(seed + 1, lambda step: DECODER_BATCH), start, DECODER_STEPS, device)

    def loss(target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            latents = vae.encode(target).latent_dist.mean
        video = decode_unclamped(vae, latents)
        error = reconstruction_loss(video, target)
        return error + SQUARE_WEIGHT * (video - target).square().mean(), error

    gradients = Gradients(loss, list(learned.parameters()), device)
    for step, bar in progress("decoder", start, DECODER_STEPS):
        factor = 0.5 + 0.5 * math.cos(math.pi * step / DECODER_STEPS)
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 100, factor)
        error = gradients(next(data))
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % SAY_EVERY == 0:
            bar(f"weighted L1 {error.item():.4f}")
        state.save_every(SAVE_EVERY, step + 1, DECODER_STEPS)
    with whole_folder(out / "vae-sharp") as folder:
        vae.save_pretrained(folder)
    return vae


@torch.no_grad()
def _set_statistics(vae: AutoencoderKLWan, seed: int) -> None:
    """Write each latent channel's mean and deviation, over fresh clips, into the stock config."""
    vae.eval()
    whole = Crops(seed, lambda step: (1, FRAMES, SIZE))
    clips = (whole[10**8 + i].to(vae.device) for i in range(STATISTICS_CLIPS))
    latents = torch.cat([vae.encode(clip).latent_dist.mean for clip in clips])
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )
