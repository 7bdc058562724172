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

from codmd.errors import UserError
from codmd.files import replacing, write_whole
from codmd.mini.progress import in_order, progress, whole_folder
from codmd.mini.train_transformer import SCHEDULE_SHIFT, Stage, scene, train_transformer
from codmd.mini.train_vae import sharpen_decoder, train_vae
from codmd.mini.words import new_tokenizer
from codmd.mini.world import FRAMES, SIZE, render
from codmd.networks import LatentCodec

SHARD = 100  # clips in a file of latents; stages begin at a file's beginning

# What the first stage does not learn is which of two objects is which (see `mini.reading`, `mini.layout`). The second
# does, mostly from the beginnings of clips, which cost a quarter of whole ones; the third carries it to whole clips.
STAGES = (
    Stage(clips=24_000, steps=16_000, batch=128, rate=1.5e-3, warmup=500, decay=0.9995),
    Stage(
        clips=3_000, pairs=0.7, steps=2_400, batch=32, rate=5e-4, warmup=100, decay=0.998, reading=0.1, layout=0.03,
        shift=5.0, frames=(3, 3, 3, 9),
    ),
    Stage(clips=9_000, pairs=0.45, steps=2_600, batch=32, rate=5e-4, warmup=100, decay=0.998, shift=4.0),
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
    files = {shard: folder / f"{seed}-{stage.pairs:g}-{shard:05d}.safetensors" for shard in shards}
    start = next((shard for shard in shards if not files[shard].exists()), shards.stop)
    videos = in_order(Clips(seed, stage.pairs), start, shards.stop, device)
    for shard, bar in progress("latents", start, shards.stop):
        latents = torch.cat([codec.encode(part) for part in next(videos).split(10 if device.type == "cpu" else SHARD)])
        with replacing(files[shard]) as aside:
            save_file({"latents": latents.half().cpu().contiguous()}, aside)
        bar(f"{(shard + 1) * SHARD - first} clips")
    return torch.cat([load_file(file)["latents"] for file in files.values()])


def assemble(out: Path, folder: Path, config: TeacherConfig) -> None:
    """Write the stock pipeline folder: what `diffusers.WanPipeline.from_pretrained` loads."""
    last = out / f"stage-{len(config.stages)}" / "trained"
    stock = WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=UMT5EncoderModel.from_pretrained(last / "text_encoder"),
        transformer=WanTransformer3DModel.from_pretrained(last / "transformer"),
        vae=AutoencoderKLWan.from_pretrained(out / "vae-sharp"),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SCHEDULE_SHIFT, num_train_timesteps=1000
        ),
    )
    facts = {"size": [FRAMES, SIZE, SIZE], "steps": 50, "guidance": 3.5, "fps": 8, "trained": asdict(config)}
    with whole_folder(folder) as aside:
        stock.save_pretrained(aside)
        for part in ("transformer", "vae"):  # diffusers notes where it loaded them from, which is nobody's business
            path = aside / part / "config.json"
            settings = json.loads(path.read_text())
            settings.pop("_name_or_path", None)
            path.write_text(json.dumps(settings, indent=2) + "\n")
        (aside / "codmd.json").write_text(json.dumps(facts, indent=2) + "\n")


def _device(name: str | None) -> torch.device:
    """The device of this name; by default a GPU where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device: {name} is not to be had here ({reason}): try cpu") from None
    return device


def _claim(out: Path, config: TeacherConfig) -> None:
    """Makes the folder this training's; refuses one that is another's, whose parts would be taken for its own."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; --out needs a folder")
    said = json.loads(json.dumps(asdict(config)))
    file = out / "training.json"
    if not file.is_file():
        if out.exists() and any(out.iterdir()):
            raise UserError(
                f"{out}: not empty, and not the folder of such a training (no training.json); another --out"
            )
        write_whole(file, (json.dumps(said, indent=2) + "\n").encode())
    elif json.loads(file.read_text(encoding="utf-8")) != said:
        raise UserError(f"{out}: a training with other settings lies here (see {file}); give another --out")


def run(
    out: str | Path = "runs/mini-teacher",
    seed: int = 0,
    config: TeacherConfig | None = None,
    device: str | None = None,
) -> Path:
    """Make the miniature from nothing; run it again to go on. Returns the pipeline folder."""
    config, out = config or TeacherConfig(seed=seed), Path(out)
    on = _device(device)
    torch.backends.cudnn.benchmark = on.type == "cuda"
    _claim(out, config)
    if not (out / "vae").is_dir():
        train_vae(out, seed=config.seed, device=on)
    # From its folder in any case: what training leaves in memory lies otherwise, and would round otherwise.
    vae = AutoencoderKLWan.from_pretrained(out / "vae")
    first = 0
    for number, stage in enumerate(config.stages, 1):
        if not (out / f"stage-{number}" / "trained").exists():
            latents = encode_clips(out / "latents", vae, stage, first=first, seed=config.seed, device=on)
            train_transformer(out, stage, latents, number=number, first=first, seed=config.seed, device=on)
        first += stage.clips
    if not (out / "vae-sharp").is_dir():
        sharpen_decoder(out, vae, seed=config.seed, device=on)
    assemble(out, out / "pipeline", config)
    return out / "pipeline"
