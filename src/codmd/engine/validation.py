"""The learning curve: the same few clips at intervals, scored, and compared with the teacher's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

import codmd
from codmd.config import ValidationConfig
from codmd.engine.ema import Ema
from codmd.engine.ranks import Ranks
from codmd.engine.shelf import write_json
from codmd.models import Model, as_student
from codmd.networks import WanNetwork
from codmd.recipe import Recipe
from codmd.sampling import Settings, generate_videos

Videos = UInt8[np.ndarray, "clips frames height width 3"]
Score = Callable[[Videos, list[str]], Mapping[str, float]]
"""Measures by name, of videos and the captions that they are to show."""

DYNAMICS, SATURATION = "dynamic_degree", "saturation"
BATCH = 8


class Validation:
    """A fixed set of prompts and seeds, kept from training, and how to score a network on it."""

    def __init__(
        self, recipe: Recipe, base: Model, prompts: tuple[str, ...], score: Score, ranks: Ranks | None = None
    ) -> None:
        self.recipe, self.base, self.score, self.ranks = recipe, base, score, ranks or Ranks()
        seeds = range(recipe.validation.seeds)
        self.prompts = [prompt for prompt in prompts for _ in seeds]
        self.seeds = [seed for _ in prompts for seed in seeds]

    def student(self, network: WanNetwork, ema: Ema | None) -> dict[str, float]:
        """Scores of the student as it is now: its averaged weights where there are any."""
        model = as_student(self.base, self.recipe.rollout.steps, network)
        with ema.applied() if ema is not None else contextlib.nullcontext():
            return self._scores(model, Settings.of(model, **asdict(self.recipe.video)))

    def teacher(self, cache: Path) -> dict[str, float]:
        """Scores of the guided teacher on the same prompts and seeds, from `cache` where they are there."""
        config = self.recipe.model
        settings = Settings.of(
            self.base,
            steps=config.teacher_steps,
            guidance=config.guidance_scale_standard,
            negative_prompt=config.negative_prompt,
            **asdict(self.recipe.video),
        )
        what = {
            "teacher": self.ranks.on_first(lambda: self.base.sha256),
            "settings": asdict(settings),
            "precision": self.recipe.train.precision,
            "shift": config.teacher_shift,
            "prompts": self.prompts,
            "seeds": self.seeds,
            "score": f"{self.score.__module__}.{self.score.__qualname__} {codmd.__version__}",
        }
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        path = cache / f"teacher-{key}.json"
        if self.ranks.on_first(path.is_file):
            return self.ranks.on_first(lambda: json.loads(path.read_text(encoding="utf-8"))["scores"])
        scores = self._scores(self.base, settings)
        self.ranks.on_first(lambda: _keep(path, {"scores": scores, "of": what}))
        return scores

    def _scores(self, model: Model, settings: Settings) -> dict[str, float]:
        """Each data rank makes its part of the clips, equally many: a sharded network is called by all together."""
        ranks, count = self.ranks, len(self.prompts)
        clips = list(range(count)) + [count - 1] * (-count % ranks.data_size)
        own = ranks.share(clips)
        prompts, seeds = [self.prompts[i] for i in own], [self.seeds[i] for i in own]
        videos = ranks.gather_on_first(generate_videos(model, prompts, seeds, settings=settings, batch=BATCH))

        def measured() -> dict[str, float]:
            scores = self.score(np.concatenate(videos[:: ranks.context])[:count], self.prompts)
            return {name: float(value) for name, value in scores.items() if math.isfinite(value)}

        return ranks.on_first(measured)


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def mini_score(videos: Videos, captions: list[str]) -> dict[str, float]:
    """The miniature's measures, named as in a learning curve, and saturation relative to the true colours."""
    from codmd import evaluation

    summary = evaluation.score(videos, captions).summary()
    return {name.replace(" ", "_"): value for name, value in summary.items()} | {
        SATURATION: 1 + summary["saturation error"]
    }


def warnings(scores: Mapping[str, float], teacher: Mapping[str, float], config: ValidationConfig) -> list[str]:
    """What the student has lost or gained against its teacher by more than the recipe's shares."""
    said = []
    if DYNAMICS in scores and DYNAMICS in teacher:
        ours, theirs = scores[DYNAMICS], teacher[DYNAMICS]
        if ours < theirs * (1 - config.warn_dynamic_drop):
            said.append(f"dynamic degree {ours:.3g}, the teacher's is {theirs:.3g}: motion is being lost")
    if SATURATION in scores and SATURATION in teacher:
        ours, theirs = scores[SATURATION], teacher[SATURATION]
        if ours > theirs * (1 + config.warn_saturation_rise):
            said.append(f"saturation {ours:.3g}, the teacher's is {theirs:.3g}: colours are being overdone")
    return said


def best(curve: list[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """The curve's best record: the highest; of an error or a gap the nearest to 0, of saturation the nearest to 1;
    the first of equals."""
    scored = [record for record in curve if isinstance(record.get(metric), int | float)]
    right = 1.0 if metric == SATURATION else 0.0 if metric.endswith(("error", "gap")) else None
    return max(scored, key=lambda r: r[metric] if right is None else -abs(r[metric] - right), default=None)
