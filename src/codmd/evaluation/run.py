"""A model of the miniature sampled, measured and held against its teacher; each part is kept once done."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import codmd
from codmd.console import meter
from codmd.errors import UserError
from codmd.evaluation.mini_benchmark import score
from codmd.evaluation.mini_prompts import evaluation_prompts
from codmd.evaluation.mini_scores import MiniScores
from codmd.files import replacing
from codmd.models import Model, load_model
from codmd.sampling import Settings, generate_latents, identity, to_frames

BATCH = 16


def evaluation_clips(prompts: int, seeds: int) -> tuple[list[str], list[int]]:
    """A caption and a seed for each clip: every evaluation prompt with every seed, prompt by prompt."""
    if seeds < 1:
        raise UserError(f"seeds: expected at least 1, got {seeds}")
    captions = [caption for caption in evaluation_prompts(prompts) for _ in range(seeds)]
    return captions, [seed for _ in range(prompts) for seed in range(seeds)]


def score_model(
    model: Model, captions: list[str], seeds: list[int], cache: Path, *, settings: Settings | None = None
) -> MiniScores:
    """The model's scores on these clips; from `cache` where these very clips were scored before."""
    settings = settings or Settings.of(model)
    path = cache / f"{scores_key(model, settings, captions, seeds)}.json"
    if path.is_file():
        return MiniScores.load(path)
    with meter(f"{model.ref}: sampling", len(captions) * settings.steps) as advance:
        done = 0

        def count(clips: int) -> None:
            nonlocal done
            done += clips
            advance(done, "")

        latents = generate_latents(model, captions, seeds, settings=settings, batch=BATCH, on_evaluation=count)
    videos = to_frames(model.pipeline.codec.decode(latents))
    with meter(f"{model.ref}: measuring", len(captions)) as advance:
        read = 0

        def read_one() -> None:
            nonlocal read
            read += 1
            advance(read, "")

        scores = score(videos, captions, latents=latents, on_clip=read_one)
    with replacing(path) as aside:
        scores.save(aside)
    return MiniScores.load(path)  # to the last digit what the next call will read


def scores_key(model: Model, settings: Settings, captions: list[str], seeds: list[int]) -> str:
    """Names all that the scores follow from: weights, sampling, captions, seeds, and the oracle's version."""
    what = json.dumps([model.kind, identity(model, settings), captions, seeds, codmd.__version__], sort_keys=True)
    return f"{model.kind}-{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}"


def run_mini(
    ref: str, *, against: str = "mini", out: Path | None = None, prompts: int = 48, seeds: int = 2
) -> dict[str, MiniScores]:
    """`codmd evaluate mini`: prints the table of both, and saves it under `out`, by default beside the model."""
    from codmd.evaluation.mini_report import report

    captions, clip_seeds = evaluation_clips(prompts, seeds)
    teacher, student = load_model(against), load_model(ref)
    folder = out if out is not None else beside(ref)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; --out needs a folder")
    cache = folder / "cache"
    scores = {
        _name(against): score_model(teacher, captions, clip_seeds, cache),
        _name(ref, other_than=_name(against)): score_model(student, captions, clip_seeds, cache),
    }
    report(scores, folder)
    print(f"the tables: {folder}")
    return scores


def _name(ref: str, other_than: str = "") -> str:
    name = Path(ref).name or ref
    return name if name != other_than else f"{name} (evaluated)"


def beside(ref: str) -> Path:
    """`evaluation` in the run's folder, or beside a model that is of no run; here for the shipped one.

    Never in a checkpoint: what was committed stays as it was written, and goes when newer ones come.
    """
    if ref == "mini":
        return Path("runs/evaluation")
    given = Path(ref)
    if (given / "checkpoints").is_dir():
        return given / "evaluation"
    place = given.resolve()
    if place.parent.name == "checkpoints":
        return place.parent.parent / "evaluation" / place.name
    return given.parent / f"{given.name}-evaluation"
