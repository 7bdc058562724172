"""Training the miniature's video autoencoder, a stock `AutoencoderKLWan` made small.

Trained on crops of rendered clips through the *unclamped* output (the stock decode ends in a clamp that kills
gradients), with a faint KL term that keeps the latents smooth enough to be modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from codmd.mini.captions import sample_prior
from codmd.mini.progress import TrainingState, progress
from codmd.mini.world import FRAMES, SIZE, object_path, render, sample_scene

LATENT_CHANNELS = 16
KL_WEIGHT, SQUARE_WEIGHT = 1e-4, 2.0
STATISTICS_CLIPS = 64
DECODER_STEPS = 2000
EDGE_WEIGHT = 4.0  # how much more a pixel counts where something moves or ends

# Rounds of the training; each is a list of (steps, (clips, frames, size) of a batch) under one cosine of the rate.
# Short small crops teach the spatial code, long ones the memory over a whole clip, whole frames the borders.
ROUNDS = (
    ((3825, (8, 5, 32)), (675, (2, 9, 64))),
    ((1300, (4, 17, 32)), (200, (2, 17, 64))),
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


def crops(seed: int, start: int, batch: int, frames: int, size: int) -> Iterator[Tensor]:
    """Endless batches `[B, 3, frames, size, size]` of crops around objects; batch n depends on (seed, n) alone."""
    for step in range(start, 10**9):
        rng = np.random.default_rng((seed, step, frames))
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
        yield torch.from_numpy(np.stack(out)).permute(0, 4, 1, 2, 3).contiguous()


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


def train_vae(out: Path, *, seed: int, rate: float = 1e-3) -> AutoencoderKLWan:
    """Train (or go on training) and save the autoencoder with its latents' statistics under `out`."""
    torch.manual_seed(seed)
    vae = new_vae()
    initialise(vae)
    for module in vae.modules():  # a third faster on CPUs
        if isinstance(module, nn.Conv3d | nn.Conv2d):
            layout = torch.channels_last_3d if isinstance(module, nn.Conv3d) else torch.channels_last
            module.weight.data = module.weight.data.contiguous(memory_format=layout)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    state = TrainingState(out / "vae-training", {"vae": vae}, {"adamw": optimizer})
    start, total = state.resume(), sum(steps for stages in ROUNDS for steps, _ in stages)
    shape, data = None, None

    for step, bar in progress("autoencoder", start, total):
        factor, wanted = schedule(step)
        optimizer.param_groups[0]["lr"] = rate * factor
        if wanted != shape or data is None:
            shape, data = wanted, crops(seed, step, *wanted)
        target = next(data)
        posterior = vae.encode(target).latent_dist
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
        video = decode_unclamped(vae, latents)
        error = reconstruction_loss(video, target)
        loss = (
            error
            + SQUARE_WEIGHT * (video - target).square().mean()
            + KL_WEIGHT * posterior.kl().mean() / latents[0].numel()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        bar(f"weighted L1 {error.item():.4f}")
        state.save_every(200, step + 1, total)

    _set_statistics(vae, seed)
    vae.save_pretrained(out / "vae")
    return vae


def sharpen_decoder(out: Path, vae: AutoencoderKLWan, *, seed: int, rate: float = 1e-3) -> AutoencoderKLWan:
    """Train (or go on training) the decoder alone on whole-length crops, and save the autoencoder anew.

    Latents stay what they are, so this may come after the transformer has learned them.
    """
    vae.train().requires_grad_(False)
    learned = nn.ModuleDict({"post_quant_conv": vae.post_quant_conv, "decoder": vae.decoder}).requires_grad_(True)
    optimizer = torch.optim.AdamW(learned.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    state = TrainingState(out / "decoder-training", {"decoder": learned}, {"adamw": optimizer})
    start = state.resume()
    data = crops(seed + 1, start, 4, FRAMES, SIZE // 2)
    for step, bar in progress("decoder", start, DECODER_STEPS):
        factor = 0.5 + 0.5 * math.cos(math.pi * step / DECODER_STEPS)
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 100, factor)
        target = next(data)
        with torch.no_grad():
            latents = vae.encode(target).latent_dist.mean
        video = decode_unclamped(vae, latents)
        error = reconstruction_loss(video, target)
        optimizer.zero_grad()
        (error + SQUARE_WEIGHT * (video - target).square().mean()).backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        bar(f"weighted L1 {error.item():.4f}")
        state.save_every(200, step + 1, DECODER_STEPS)
    vae.save_pretrained(out / "vae-sharp")
    return vae


@torch.no_grad()
def _set_statistics(vae: AutoencoderKLWan, seed: int) -> None:
    """Write each latent channel's mean and deviation, over fresh clips, into the stock config."""
    vae.eval()
    clips = (next(crops(seed, 10**8 + i, 1, FRAMES, SIZE)) for i in range(STATISTICS_CLIPS))
    latents = torch.cat([vae.encode(clip).latent_dist.mean for clip in clips])
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )
