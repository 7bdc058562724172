"""`codmd mini train-teacher`: data -> autoencoder -> text encoder and transformer -> the shipped folder.

Everything is a function of the seed, shows its progress, and goes on from where it was stopped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import UMT5EncoderModel

from codmd.mini.progress import in_order, progress
from codmd.mini.train_transformer import SCHEDULE_SHIFT, Stage, scene, train_transformer
from codmd.mini.train_vae import sharpen_decoder, train_vae
from codmd.mini.words import new_tokenizer
from codmd.mini.world import FRAMES, SIZE, render
from codmd.networks import LatentCodec

SHARD = 100  # clips in a file of latents; stages begin at a file's beginning

# The second stage is for what the first learns last: which of two objects is which (see `mini.reading`, `mini.layout`).
STAGES = (
    Stage(clips=24_000, steps=16_000, batch=128, rate=1.5e-3, warmup=500, decay=0.9995),
    Stage(
        clips=6_000, pairs=0.7, steps=4_000, batch=16, rate=5e-4, warmup=100, decay=0.998, reading=0.1, layout=0.03,
        shift=5.0,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """What the shipped teacher was made with."""

    stages: tuple[Stage, ...] = STAGES
    seed: int = 0


class Clips(Dataset[Tensor]):
    """Videos `[SHARD, 3, F, H, W]` of the training set's scenes, a shard at a time."""

    def __init__(self, seed: int, pairs: float) -> None:
        self.seed, self.pairs = seed, pairs

    def __getitem__(self, shard: int) -> Tensor:
        numbers = range(shard * SHARD, (shard + 1) * SHARD)
        video = np.stack([render(scene(self.seed, i, self.pairs)) for i in numbers])
        return torch.from_numpy(video).permute(0, 4, 1, 2, 3)


def encode_clips(
    folder: Path, vae: AutoencoderKLWan, stage: Stage, *, first: int, seed: int, device: torch.device
) -> Tensor:
    """Latents of a stage's scenes, from `first` on, normalised; kept in shards, so that it can be interrupted."""
    codec = LatentCodec(vae.to(device))
    folder.mkdir(parents=True, exist_ok=True)
    shards = range(first // SHARD, (first + stage.clips) // SHARD)
    files = {shard: folder / f"{seed}-{shard:05d}.safetensors" for shard in shards}
    start = next((shard for shard in shards if not files[shard].exists()), shards.stop)
    videos = in_order(Clips(seed, stage.pairs), start, shards.stop, device)
    for shard, bar in progress("latents", start, shards.stop):
        latents = torch.cat([codec.encode(part) for part in next(videos).split(10 if device.type == "cpu" else SHARD)])
        aside = files[shard].with_suffix(".writing")
        save_file({"latents": latents.half().cpu().contiguous()}, aside)
        aside.replace(files[shard])
        bar(f"{(shard + 1) * SHARD - first} clips")
    return torch.cat([load_file(file)["latents"] for file in files.values()])


def assemble(out: Path, folder: Path, config: TeacherConfig) -> None:
    """Write the stock pipeline folder: what `diffusers.WanPipeline.from_pretrained` loads."""
    last = out / f"stage-{len(config.stages)}"
    WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=UMT5EncoderModel.from_pretrained(last / "text_encoder"),
        transformer=WanTransformer3DModel.from_pretrained(last / "transformer"),
        vae=AutoencoderKLWan.from_pretrained(out / "vae-sharp"),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SCHEDULE_SHIFT, num_train_timesteps=1000
        ),
    ).save_pretrained(folder)
    for part in ("transformer", "vae"):  # diffusers notes where it loaded them from, which is nobody's business
        path = folder / part / "config.json"
        settings = json.loads(path.read_text())
        settings.pop("_name_or_path", None)
        path.write_text(json.dumps(settings, indent=2) + "\n")
    facts = {"size": [FRAMES, SIZE, SIZE], "steps": 50, "guidance": 3.5, "fps": 8, "trained": asdict(config)}
    (folder / "codmd.json").write_text(json.dumps(facts, indent=2) + "\n")


def run(
    out: str | Path = "runs/mini-teacher",
    seed: int = 0,
    config: TeacherConfig | None = None,
    device: str | None = None,
) -> Path:
    """Make the miniature from nothing; run it again to go on. Returns the pipeline folder."""
    config, out = config or TeacherConfig(seed=seed), Path(out)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.benchmark = on.type == "cuda"
    if (out / "vae" / "config.json").exists():
        vae = AutoencoderKLWan.from_pretrained(out / "vae")
    else:
        vae = train_vae(out, seed=config.seed, device=on)
    first = 0
    for number, stage in enumerate(config.stages, 1):
        if not (out / f"stage-{number}" / "transformer" / "config.json").exists():
            latents = encode_clips(out / "latents", vae, stage, first=first, seed=config.seed, device=on)
            train_transformer(out, stage, latents, number=number, first=first, seed=config.seed, device=on)
        first += stage.clips
    if not (out / "vae-sharp" / "config.json").exists():
        sharpen_decoder(out, vae, seed=config.seed, device=on)
    assemble(out, out / "pipeline", config)
    return out / "pipeline"
