"""The whole story from one command: a teacher, two students, what the oracle says of them, one page.

Each part is kept under the demo's folder as soon as it is done, under a name that says what it was made
from: a second run goes on where the first one stopped, and another seed or teacher shares nothing by mistake.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import codmd
from codmd.console import clock, meter
from codmd.engine.distill import distill
from codmd.errors import UserError
from codmd.evaluation import MiniScores, evaluation_prompts, score
from codmd.files import replacing, write_whole
from codmd.models import Model, load_model
from codmd.recipe import load_recipe, to_toml
from codmd.report import DemoResult, write_page
from codmd.report.gather import NAMES, Samples, as_json, column, commands, curves, facts, shots
from codmd.sampling import Settings, generate_latents, identity, to_frames

STUDENTS = ("dmd", "codmd")
BATCH = 16
QUICK = (
    "train.iterations=4", "train.student_every=2", "train.batch=2", "train.checkpoint_every=0",
    "validation.every=2", "validation.prompts=2", "model.teacher_steps=4",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it is done."""

    prompts: int = 48
    seeds: int = 2
    overrides: tuple[str, ...] = ()


GUESS = {"teacher": 75, "dmd": 135, "codmd": 125, "students": 20, "measures": 10, "page": 15}
"""Seconds of each part on two cores."""


class Parts:
    """Says which part begins and how long all of it will take; adds up what each part took, over all sittings.

    A part belongs to a seed, but for the teacher's clips, which all seeds share.
    """

    def __init__(self, out: Path, *, seed: int, quick: bool) -> None:
        self.file = out / "timings.json"
        self.all: dict[str, float] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        size = " (quick)" if quick else ""
        self.keys = {name: f"{name}{'' if name == 'teacher' else f', seed {seed}'}{size}" for name in GUESS}
        self.guessed = self.spent = 0.0
        self.left = dict(GUESS)

    @property
    def took(self) -> dict[str, float]:
        return {name: self.all[key] for name, key in self.keys.items() if key in self.all}

    @contextmanager
    def part(self, name: str, what: str) -> Iterator[None]:
        pace = self.spent / self.guessed if self.guessed else 1.0
        number = len(GUESS) - len(self.left) + 1
        about = clock(pace * sum(self.left.values()))
        print(f"[{number}/{len(GUESS)}] {what} (about {about} left in all)", flush=True)
        begun, guess, before = time.monotonic(), self.left.pop(name), self.took.get(name, 0.0)
        try:
            yield
        finally:
            spent = time.monotonic() - begun
            if not before or spent > 0.05 * guess:  # else it was there already, and was only read again
                self.all[self.keys[name]] = before + spent
                write_whole(self.file, json.dumps(self.all, indent=1).encode())
            self.guessed, self.spent = self.guessed + guess, self.spent + self.took[name]


def run(*, out: Path, quick: bool = False, seed: int = 0, base: str = "mini") -> Path:
    """`codmd demo`: everything that is not there yet; the path of the page."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; --out needs a folder")
    scale = Scale(prompts=4, seeds=1, overrides=QUICK) if quick else Scale()
    recipes = {
        method: load_recipe(
            "mini",
            [
                f"objective.method={method}",
                f"name=demo-{method}",
                f"seed={seed}",
                f"model.base={base}",
                *scale.overrides,
            ],
        )
        for method in STUDENTS
    }
    teacher = load_model(base)
    captions = [caption for caption in evaluation_prompts(scale.prompts) for _ in range(scale.seeds)]
    seeds = [s for _ in range(scale.prompts) for s in range(scale.seeds)]
    out.mkdir(parents=True, exist_ok=True)
    parts = Parts(out, seed=seed, quick=quick)

    samples: dict[str, Samples] = {}
    with parts.part("teacher", f"{len(captions)} clips by the teacher"):
        config = recipes["dmd"].model
        settings = Settings.of(
            teacher,
            steps=config.teacher_steps,
            guidance=config.guidance_scale_standard,
            negative_prompt=config.negative_prompt,
        )
        samples["teacher"] = sample(out, "teacher", teacher, settings, captions, seeds)
    models = {"teacher": teacher}
    runs = {method: out / f"{method}-seed{seed}{'-quick' if quick else ''}" for method in recipes}
    for method, recipe in recipes.items():
        with parts.part(method, f"{NAMES[method]}: {recipe.train.iterations} iterations"):
            result = distill(recipe, runs[method], base=teacher, reference_cache=out / "reference")
            if result.exit_code:
                print("stopped; the same command goes on from here")
                raise SystemExit(result.exit_code)
            models[method] = load_model(result.checkpoint)
    with parts.part("students", "the same clips by the students"):
        for method in STUDENTS:
            chosen = Settings.of(models[method])
            samples[method] = sample(out, method, models[method], chosen, captions, seeds)
    with parts.part("measures", "what the oracle says"):
        scores = {name: measure(out, name, some, captions) for name, some in samples.items()}
    with parts.part("page", "the page"):
        page = DemoResult(
            columns=tuple(column(name, samples[name], scores, models[name], settings) for name in models),
            shots=tuple(shots(samples, scores, captions, seeds, teacher.defaults.fps)),
            curves=curves(runs, result.teacher),
            frames=settings.frames,
            fps=teacher.defaults.fps,
            facts=facts(recipes["dmd"], teacher, scale.prompts, scale.seeds, parts.took),
            commands=commands(out, seed, quick),
            recipe=to_toml(recipes["codmd"]),
            differences='the other student differs in objective.method = "dmd" alone',
            quick=quick,
        )
        write_whole(out / "results.json", json.dumps(as_json(page), indent=1).encode())
        path = write_page(page, out)
    print(f"the page: {path.resolve()}")
    return path


# ---- parts ---------------------------------------------------------------------------------------


def sample(out: Path, name: str, model: Model, settings: Settings, captions: list[str], seeds: list[int]) -> Samples:
    """The model's clips, from disk where these very clips are there."""
    made_from = json.dumps([identity(model, settings), captions, seeds], sort_keys=True)
    key = hashlib.blake2b(made_from.encode(), digest_size=6).hexdigest()
    path = out / "clips" / f"{name}-{key}.safetensors"
    evaluations = settings.evaluations()
    if path.is_file():
        with safe_open(path, "pt") as file:
            seconds = float(file.metadata()["seconds_per_clip"])
            videos, latents = file.get_tensor("videos").numpy(), file.get_tensor("latents")
        return Samples(videos=videos, latents=latents, seconds_per_clip=seconds, evaluations=evaluations, key=key)
    generate_latents(model, captions[:1], seeds[:1], settings=settings)  # so that no start-up is timed
    with meter(name, len(captions) * settings.steps) as advance:
        done = 0

        def count(clips: int) -> None:
            nonlocal done
            done += clips
            advance(done, "")

        begun = time.perf_counter()
        latents = generate_latents(model, captions, seeds, settings=settings, batch=BATCH, on_evaluation=count)
        seconds = (time.perf_counter() - begun) / len(captions)
    videos = to_frames(model.pipeline.codec.decode(latents))
    with replacing(path) as aside:
        tensors = {"videos": torch.from_numpy(np.ascontiguousarray(videos)), "latents": latents.contiguous()}
        save_file(tensors, aside, metadata={"seconds_per_clip": str(seconds)})
    return Samples(videos=videos, latents=latents, seconds_per_clip=seconds, evaluations=evaluations, key=key)


def measure(out: Path, name: str, samples: Samples, captions: list[str]) -> MiniScores:
    """The oracle's reading of a model's clips, from disk where it is there."""
    path = out / "scores" / f"{name}-{samples.key}-{codmd.__version__}.json"
    if path.is_file():
        return MiniScores.load(path)
    with meter(f"{name}: measures", len(captions)) as advance:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            advance(done, "")

        scores = score(samples.videos, captions, latents=samples.latents, on_clip=count)
    with replacing(path) as aside:
        scores.save(aside)
    return scores
