"""Videos from a teacher (its stock scheduler, guided) or from a student (few steps, the rollout of training).

A clip's noise is keyed by its prompt and seed alone: teacher and student start from the same noise, whatever
the batch, the order of the prompts, or what else is sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from codmd.console import meter
from codmd.data.prompts import read_prompts
from codmd.data.streams import keyed_generator
from codmd.errors import UserError
from codmd.models import Model, load_model
from codmd.networks import TextCondition
from codmd.networks.wan import NETWORK_TIME
from codmd.rollout import rollout
from codmd.video import file_stem, finished, magnification, write_clip

Latents = Float[Tensor, "clips channels latent_frames latent_height latent_width"]
Videos = UInt8[np.ndarray, "clips frames height width 3"]
OnEvaluation = Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How clips are made. `steps` counts network calls along the path; guidance doubles each call's batch."""

    steps: int
    guidance: float  # w in u + w(c - u); 1 is none
    frames: int
    height: int
    width: int
    negative_prompt: str = ""

    @classmethod
    def of(cls, model: Model, **given: Any) -> Settings:
        """The model's own settings, but for what is given and is not None; refused where it cannot work."""
        own = {name: getattr(model.defaults, name) for name in cls.__dataclass_fields__}
        settings = cls(**{**own, **{name: value for name, value in given.items() if value is not None}})
        settings.check(model)
        return settings

    def check(self, model: Model) -> None:
        if self.steps < 1:
            raise UserError(f"steps: expected at least 1, got {self.steps}")
        if model.times is not None and self.steps != len(model.times):
            times = ", ".join(f"{t:g}" for t in model.times)
            raise UserError(
                f"steps: {model.ref} was distilled for {len(model.times)} steps (t = {times}), "
                f"got {self.steps}; leave --steps out, or distil a student with another rollout.steps"
            )
        if not 0 <= self.guidance < float("inf"):
            raise UserError(f"guidance: expected a finite number of at least 0, got {self.guidance}")
        vae, patch = model.pipeline.codec.vae.config, model.network.transformer.config.patch_size
        for name, scale in (
            ("height", vae.scale_factor_spatial * patch[1]),
            ("width", vae.scale_factor_spatial * patch[2]),
        ):
            if getattr(self, name) < 1 or getattr(self, name) % scale:
                raise UserError(f"{name}: expected a multiple of {scale}, got {getattr(self, name)}")
        if self.frames < 1 or (self.frames - 1) % vae.scale_factor_temporal:
            raise UserError(f"frames: expected a multiple of {vae.scale_factor_temporal} plus 1, got {self.frames}")

    def evaluations(self) -> int:
        """Network evaluations for one clip (NFE)."""
        return self.steps * (1 if self.guidance == 1 else 2)

    def latent_shape(self, model: Model) -> tuple[int, int, int, int]:
        return model.pipeline.codec.latent_shape(self.frames, self.height, self.width)


def noise_of(prompt: str, seed: int, shape: Sequence[int], step: int = 0) -> Float[Tensor, "*shape"]:
    """The noise with which step `step` of this clip begins."""
    return torch.randn(*shape, generator=keyed_generator(seed, "sample", prompt, step))


@torch.no_grad()
def generate_latents(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    settings: Settings | None = None,
    batch: int = 4,
    on_evaluation: OnEvaluation = None,
) -> Latents:
    """One clip's latents for each (prompt, seed) pair. `on_evaluation(n)` hears of n clips' network calls."""
    settings = settings or Settings.of(model)
    parts = []
    for some_prompts, some_seeds in _batches(prompts, seeds, batch):
        text = model.encode(some_prompts)
        parts.append(_sample(model, settings, text, some_prompts, some_seeds, on_evaluation))
    return torch.cat(parts)


def _sample(
    model: Model,
    settings: Settings,
    text: TextCondition,
    prompts: list[str],
    seeds: list[int],
    on_evaluation: OnEvaluation,
) -> Latents:
    shape = settings.latent_shape(model)
    device = model.device
    text = text.to(device)

    def noise(step: int) -> Latents:
        return torch.stack([noise_of(p, s, shape, step) for p, s in zip(prompts, seeds, strict=True)]).to(device)

    network = model.guided(settings.guidance, settings.negative_prompt)

    def count() -> None:
        if on_evaluation is not None:
            on_evaluation(len(prompts))

    if model.times is not None:

        def predict_x0(x_t: Latents, t: Float[Tensor, " clips"], text: TextCondition) -> Latents:
            count()
            return network.x0(x_t, t, text)

        return rollout(predict_x0, noise(0), text, model.times, noise)

    scheduler = copy.deepcopy(model.pipeline.scheduler)
    scheduler.set_timesteps(settings.steps, device=device)
    x = noise(0)
    for timestep in scheduler.timesteps:
        t = (timestep.float() / NETWORK_TIME).expand(len(x))
        x = scheduler.step(network.velocity(x, t, text), timestep, x, return_dict=False)[0]
        count()
    return x


def to_frames(video: Float[Tensor, "clips 3 frames height width"]) -> Videos:
    """Videos in [-1, 1] as bytes."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).cpu().numpy()


def generate_videos(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    settings: Settings | None = None,
    batch: int = 4,
    on_evaluation: OnEvaluation = None,
) -> Videos:
    """One clip for each (prompt, seed) pair."""
    latents = generate_latents(model, prompts, seeds, settings=settings, batch=batch, on_evaluation=on_evaluation)
    return to_frames(model.pipeline.codec.decode(latents))


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """One video, and what it was made from. `path` is where it was written, if it was."""

    prompt: str
    seed: int
    frames: UInt8[np.ndarray, "frames height width 3"]
    path: Path | None = None


def sample(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    out: Path | str | None = None,
    batch: int = 4,
    scale: int | None = None,
    on_evaluation: OnEvaluation = None,
    **settings: Any,
) -> list[Clip]:
    """Every prompt with every seed, prompt by prompt; written under `out` where one is given.

    `settings`: steps, guidance, frames, height, width, negative_prompt; the model's own where left out.
    """
    chosen = Settings.of(model, **settings)
    pairs = [(prompt, seed) for prompt in _clean(prompts) for seed in seeds]
    folder = None if out is None else Path(out)
    return list(_make(model, chosen, pairs, folder, batch, scale, on_evaluation))


def _make(
    model: Model,
    settings: Settings,
    pairs: Sequence[tuple[str, int]],
    out: Path | None,
    batch: int,
    scale: int | None,
    on_evaluation: OnEvaluation,
) -> Iterator[Clip]:
    """Clips as they are made; each batch is on disk before the next begins."""
    for some_prompts, some_seeds in _batches(*_columns(pairs), batch):
        videos = generate_videos(
            model, some_prompts, some_seeds, settings=settings, batch=batch, on_evaluation=on_evaluation
        )
        for prompt, seed, frames in zip(some_prompts, some_seeds, videos, strict=True):
            path = None
            if out is not None:
                about = describe(model, settings, prompt, seed) | {"magnified": magnified(settings, scale)}
                stem = stem_of(model, settings, scale, prompt, seed)
                path = write_clip(out, stem, frames, about, fps=model.defaults.fps, scale=scale)
            yield Clip(prompt=prompt, seed=seed, frames=frames, path=path)


def identity(model: Model, settings: Settings) -> dict[str, Any]:
    """What, beside prompt and seed, decides how a clip looks."""
    scheduler = model.pipeline.scheduler
    own = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}  # which say no more
    sampler = model.times if model.times is not None else {**own, "class": type(scheduler).__name__}
    return {**vars(settings), "model_sha256": model.sha256, "sampler": sampler}


def magnified(settings: Settings, scale: int | None) -> int:
    """How many times each pixel is drawn in each direction in a clip's file."""
    return magnification(settings.height, settings.width) if scale is None else scale


def stem_of(model: Model, settings: Settings, scale: int | None, prompt: str, seed: int) -> str:
    """The name of a clip's file, which another model, setting or scale does not share."""
    return file_stem(prompt, seed, {**identity(model, settings), "magnified": magnified(settings, scale)})


def describe(model: Model, settings: Settings, prompt: str, seed: int) -> dict[str, Any]:
    """The JSON beside a clip: enough to make it again."""
    import diffusers
    import transformers

    import codmd

    scheduler = model.pipeline.scheduler
    if model.times is not None:
        times = list(model.times)
    else:
        stock = copy.deepcopy(scheduler)
        stock.set_timesteps(settings.steps)
        times = [round(float(t) / NETWORK_TIME, 6) for t in stock.timesteps]
    return {
        "prompt": prompt,
        "seed": seed,
        "model": model.ref,
        "kind": model.kind,
        "model_sha256": model.sha256,
        "sampler": "few-step rollout, fresh noise at each step" if model.times else type(scheduler).__name__,
        "times": times,
        "network_evaluations": settings.evaluations(),
        **vars(settings),
        "fps": model.defaults.fps,
        "versions": {
            "codmd": codmd.__version__,
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
    }


# ---- the command ---------------------------------------------------------------------------------


def run(
    ref: str,
    *,
    prompts: Sequence[str] = (),
    prompts_file: Path | None = None,
    out: Path = Path("runs/samples"),
    steps: int | None = None,
    seeds: int = 5,
    seed0: int = 0,
    guidance: float | None = None,
    frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    batch: int = 4,
    scale: int | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """`codmd sample`: writes what is not there yet, and returns the path of every clip."""
    asked = [*prompts, *(read_prompts(prompts_file) if prompts_file is not None else ())]
    if not asked:
        raise UserError("nothing to sample: give --prompt TEXT (many times if you like) or --prompts FILE")
    for name, value in (("seeds", seeds), ("batch", batch)):
        if value < 1:
            raise UserError(f"{name}: expected at least 1, got {value}")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; --out needs a folder")
    model = load_model(ref)
    settings = Settings.of(model, steps=steps, guidance=guidance, frames=frames, height=height, width=width)
    pairs = [(p, s) for p in _clean(asked) for s in range(seed0, seed0 + seeds)]
    stems = {pair: stem_of(model, settings, scale, *pair) for pair in pairs}
    todo = [pair for pair in pairs if not finished(out, stems[pair])]
    paths = [out / f"{stem}.mp4" for stem in stems.values()]
    if dry_run:
        for pair, path in zip(pairs, paths, strict=True):
            print(path, "" if pair in todo else "(done)")
        return paths
    with meter("sampling", len(todo) * settings.steps) as advance:
        done = 0

        def count(clips: int) -> None:
            nonlocal done
            done += clips
            advance(done, "")

        for _ in _make(model, settings, todo, out, batch, scale, count):
            pass
    print(f"{len(todo)} videos made, {len(pairs) - len(todo)} were there: {out}")
    return paths


def _clean(prompts: Sequence[str]) -> list[str]:
    """Each prompt once, in order."""
    if not prompts:
        raise UserError("prompts: expected at least one, got none")
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("an empty prompt: say what the video should show")
    return list(dict.fromkeys(prompts))


def _columns(pairs: Sequence[tuple[str, int]]) -> tuple[list[str], list[int]]:
    return [prompt for prompt, _ in pairs], [seed for _, seed in pairs]


def _batches(prompts: Sequence[str], seeds: Sequence[int], batch: int) -> Iterator[tuple[list[str], list[int]]]:
    if len(prompts) != len(seeds):
        raise UserError(f"expected a seed for each prompt, got {len(prompts)} prompts and {len(seeds)} seeds")
    for first in range(0, len(prompts), batch):
        yield list(prompts[first : first + batch]), list(seeds[first : first + batch])
