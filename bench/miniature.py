"""`python -m bench.miniature`: what `codmd mini train-teacher` costs on this CPU, from a few steps of each part.

Rendering, forward and backward passes are timed; optimizers and files, which cost little beside them, are not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from codmd import flow
from codmd.mini.train_teacher import SHARD, STAGES, Clips
from codmd.mini.train_transformer import Examples, Stage
from codmd.mini.train_vae import (
    DECODER_BATCH,
    DECODER_STEPS,
    LATENT_CHANNELS,
    ROUNDS,
    Crops,
    decode_unclamped,
    reconstruction_loss,
)
from codmd.models import Model, load_model

TIMED = 3
LATENT = (LATENT_CHANNELS, 9, 8, 8)


def seconds(work: Callable[[int], None]) -> float:
    """The median of a few calls, after one that is not counted."""
    taken = []
    for n in range(TIMED + 1):
        begun = time.perf_counter()
        work(n)
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def autoencoder_step(model: Model, shape: tuple[int, int, int], *, encoder_learns: bool) -> float:
    """Seconds of a step on a batch of (clips, frames, size)."""
    vae = model.pipeline.codec.vae
    vae.requires_grad_(True)
    data = Crops(0, lambda step: shape)

    def step(n: int) -> None:
        target = data[n]
        with torch.set_grad_enabled(encoder_learns):
            latents = vae.encode(target).latent_dist.mean
        reconstruction_loss(decode_unclamped(vae, latents), target).backward()

    return seconds(step)


def transformer_step(model: Model, number: int, stage: Stage) -> float:
    """Seconds of a step, the mean over the lengths that it takes in turn."""
    network = model.network.requires_grad_(True)
    text = model.pipeline.text
    text.model.requires_grad_(True)

    def at(place: int) -> float:
        data = Examples(0, number, stage, 0, LATENT)

        def step(n: int) -> None:
            _, ids, lengths, _, _, eps, t = data[n * len(stage.frames) + place]
            with torch.autocast("cpu", torch.bfloat16):
                velocity = network.velocity(flow.add_noise(eps, eps, t), t, text.embed(ids, lengths))
            velocity.float().square().mean().backward()

        return seconds(step)

    each = {frames: at(stage.frames.index(frames)) for frames in set(stage.frames)}
    return sum(each[frames] for frames in stage.frames) / len(stage.frames)


def latents_shard(model: Model, stage: Stage) -> float:
    """Seconds to render and encode a file of latents."""
    data = Clips(0, stage.pairs)

    def shard(n: int) -> None:
        for part in data[n].split(10):
            model.pipeline.codec.encode(part)

    return seconds(shard)


def parts() -> Iterator[tuple[str, float]]:
    """Each part of the training, and its seconds."""
    model = load_model("mini", "cpu")
    stages = [stage for stages in ROUNDS for stage in stages]
    yield "autoencoder", sum(n * autoencoder_step(model, shape, encoder_learns=True) for n, shape in stages)
    yield "decoder alone", DECODER_STEPS * autoencoder_step(model, DECODER_BATCH, encoder_learns=False)
    model.pipeline.codec.vae.requires_grad_(False)
    for number, stage in enumerate(STAGES, 1):
        yield f"latents for stage {number}", stage.clips / SHARD * latents_shard(model, stage)
        yield f"transformer, stage {number}", stage.steps * transformer_step(model, number, stage)


def main() -> None:
    threads, total = torch.get_num_threads(), 0.0
    print(f"{threads} threads of {os.cpu_count()} cores")
    for name, spent in parts():
        total += spent
        print(f"{name:24} {spent / 3600:6.2f} h {threads * spent / 3600:7.2f} CPU-hours", flush=True)
    print(f"{'in all':24} {total / 3600:6.2f} h {threads * total / 3600:7.2f} CPU-hours")


if __name__ == "__main__":
    main()
