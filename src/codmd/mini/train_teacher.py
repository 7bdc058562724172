"""`codmd mini train-teacher`: data -> autoencoder -> text encoder and transformer -> the shipped folder.

Everything is a function of the seed, shows its progress, and goes on from where it was stopped. The transformer and
the text encoder learn together by flow matching on latents of rendered clips, with captions drawn anew for a clip
each time it is used, and dropped one time in ten for guidance.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from codmd import flow
from codmd.data.streams import keyed_generator
from codmd.mini.captions import describe, held_out, sample_prior, write
from codmd.mini.progress import TrainingState, progress
from codmd.mini.train_vae import LATENT_CHANNELS, sharpen_decoder, train_vae
from codmd.mini.words import TEXT_WIDTH, new_text_encoder, new_tokenizer
from codmd.mini.world import FRAMES, SIZE, Scene, render, sample_scene
from codmd.networks import LatentCodec, TextEncoder, WanNetwork

DROPPED_CAPTIONS = 0.1
SCHEDULE_SHIFT = 3.0  # of the training times and of the stock scheduler
SHARD = 250
SAVE_EVERY = 500  # steps


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """What the shipped teacher was made with."""

    clips: int = 6_000
    steps: int = 7_200
    batch: int = 16
    rate: float = 1.5e-3
    warmup: int = 300
    decay: float = 0.999  # of the running mean of the weights, which is what is shipped
    seed: int = 0


def new_transformer() -> WanTransformer3DModel:
    """Wan2.1's transformer with 5 layers of width 192: 144 tokens for a clip of 9 latent frames of 8 x 8."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=64, in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=512, num_layers=5,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def scene(seed: int, index: int) -> Scene:
    """The training set's scene number `index`."""
    rng = np.random.default_rng((seed, index))
    return sample_scene(sample_prior(rng), rng)


def caption(truth: Scene, rng: np.random.Generator) -> str:
    """A caption of a scene that is not one of the evaluation's."""
    while held_out(text := write(describe(truth, rng))):
        continue
    return text


def encode_clips(folder: Path, vae: AutoencoderKLWan, clips: int, seed: int) -> Tensor:
    """Latents of the first `clips` scenes, normalised; kept on disk in shards, so that it can be interrupted."""
    codec, shards = LatentCodec(vae), []
    folder.mkdir(parents=True, exist_ok=True)
    for shard, bar in progress("latents", 0, math.ceil(clips / SHARD)):
        file = folder / f"{seed}-{shard:04d}.safetensors"
        if not file.exists():
            parts = []
            for first in range(shard * SHARD, (shard + 1) * SHARD, 10):
                video = np.stack([render(scene(seed, i)) for i in range(first, first + 10)])
                parts.append(codec.encode(torch.from_numpy(video).permute(0, 4, 1, 2, 3)))
            aside = file.with_suffix(".writing")
            save_file({"latents": torch.cat(parts).half()}, aside)
            aside.replace(file)
        shards.append(load_file(file)["latents"])
        bar(f"{(shard + 1) * SHARD} clips")
    return torch.cat(shards)[:clips].float()


class Optimizers(torch.optim.Optimizer):
    """Muon for the blocks' matrices, AdamW for the rest, behind one optimizer's face."""

    def __init__(self, network: WanNetwork, text: nn.Module, rate: float) -> None:
        matrices = [p for n, p in network.named_parameters() if ".blocks." in n and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for m in (network, text) for p in m.parameters() if id(p) not in chosen]
        self.muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.parameters = matrices + others

    def set_rate(self, rate: float) -> None:
        for group in (*self.muon.param_groups, *self.adamw.param_groups):
            group["lr"] = rate

    def step(self) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def train_transformer(out: Path, latents: Tensor, config: TeacherConfig) -> None:
    """Flow matching on latents and captions; saves the averaged transformer and text encoder under `out`."""
    torch.manual_seed(config.seed)
    network, text_model = WanNetwork(new_transformer()), new_text_encoder()
    text = TextEncoder(new_tokenizer(), text_model)
    learned = nn.ModuleDict({"network": network, "text": text_model})
    mean = torch.optim.swa_utils.AveragedModel(
        learned, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(config.decay)
    )
    optimizer = Optimizers(network, text_model, config.rate)
    optimizers = {"muon": optimizer.muon, "adamw": optimizer.adamw}
    state = TrainingState(out / "teacher-training", {"learned": learned, "mean": mean}, optimizers)
    losses: list[float] = []

    for step, bar in progress("teacher", state.resume(), config.steps):
        fade = min(1.0, (config.steps - step) / (0.4 * config.steps))  # constant, then linear to zero
        optimizer.set_rate(config.rate * min((step + 1) / config.warmup, fade))
        rng = np.random.default_rng((config.seed, step, 1))
        generator = keyed_generator(config.seed, "teacher", step)

        index = rng.integers(0, len(latents), config.batch)
        dropped = rng.random(config.batch) < DROPPED_CAPTIONS
        texts = ["" if d else caption(scene(config.seed, int(i)), rng) for i, d in zip(index, dropped, strict=True)]
        x0 = latents[torch.from_numpy(index)]
        eps = torch.randn(x0.shape, generator=generator)
        u = torch.sigmoid(torch.randn(config.batch, generator=generator))
        t = flow.shift(u, SCHEDULE_SHIFT)

        with torch.autocast("cpu", torch.bfloat16):
            condition = text.embed(*text.tokenize(texts))
            velocity = network.velocity(flow.add_noise(x0, eps, t), t, condition)
        loss = (velocity.float() - flow.velocity(x0, eps)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(optimizer.parameters, 1.0)
        optimizer.step()
        mean.update_parameters(learned)
        losses.append(loss.item())
        bar(f"flow loss {sum(losses[-200:]) / len(losses[-200:]):.4f}")
        state.save_every(SAVE_EVERY, step + 1, config.steps)

    learned.load_state_dict(mean.module.state_dict())
    network.transformer.save_pretrained(out / "transformer")
    text_model.save_pretrained(out / "text_encoder")


def assemble(out: Path, folder: Path, config: TeacherConfig) -> None:
    """Write the stock pipeline folder: what `diffusers.WanPipeline.from_pretrained` loads."""
    from transformers import UMT5EncoderModel

    WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=UMT5EncoderModel.from_pretrained(out / "text_encoder"),
        transformer=WanTransformer3DModel.from_pretrained(out / "transformer"),
        vae=AutoencoderKLWan.from_pretrained(out / "vae-sharp"),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SCHEDULE_SHIFT, num_train_timesteps=1000
        ),
    ).save_pretrained(folder)
    facts = {"size": [FRAMES, SIZE, SIZE], "steps": 50, "guidance": 3.5, "fps": 8, "trained": vars(config)}
    (folder / "codmd.json").write_text(json.dumps(facts, indent=2) + "\n")


def run(out: str | Path = "runs/mini-teacher", seed: int = 0, config: TeacherConfig | None = None) -> Path:
    """Make the miniature from nothing; run it again to go on. Returns the pipeline folder."""
    config, out = config or TeacherConfig(seed=seed), Path(out)
    if (out / "vae" / "config.json").exists():
        vae = AutoencoderKLWan.from_pretrained(out / "vae")
    else:
        vae = train_vae(out, seed=config.seed)
    latents = encode_clips(out / "latents", vae, config.clips, config.seed)
    train_transformer(out, latents, config)
    if not (out / "vae-sharp" / "config.json").exists():
        sharpen_decoder(out, vae, seed=config.seed)
    assemble(out, out / "pipeline", config)
    return out / "pipeline"
