"""Student against teacher: 4 network evaluations a clip against 50 × 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.timing import Ratio, Timed, paired_ratio
from codmd.evaluation import evaluation_prompts
from codmd.models import Model, as_student
from codmd.networks import TextCondition, TextEncoder
from codmd.recipe import load_recipe
from codmd.sampling import Settings, generate_latents, to_frames


class Encoded(TextEncoder):
    """A text encoder that has encoded everything before: what is timed is denoising only."""

    def __init__(self, encoder: TextEncoder, prompts: Sequence[str]) -> None:
        super().__init__(encoder.tokenizer, encoder.model)
        self._known = {prompt: encoder.encode([prompt]) for prompt in prompts}

    def encode(self, prompts: Sequence[str], batch: int = 64) -> TextCondition:
        return TextCondition.cat([self._known[prompt] for prompt in prompts])


def student_against_teacher(base: Model, rounds: int, clips: int, steps: int | None = None) -> dict[str, Ratio]:
    """Seconds of the teacher over seconds of the student, for the same clips: denoising, and from text to pixels."""
    recipe = load_recipe("mini").model
    prompts = evaluation_prompts(clips)
    seeds = list(range(clips))
    of_teacher = Settings.of(
        base,
        steps=steps or recipe.teacher_steps,
        guidance=recipe.guidance_scale_standard,
        negative_prompt=recipe.negative_prompt,
    )

    def measure(model: Model, *, decode: bool) -> Ratio:
        # The teacher's own network: what a student's weights are costs no time.
        student = as_student(model, load_recipe("mini").rollout.steps)

        def make(one: Model, settings: Settings) -> Timed:
            def work() -> None:
                latents = generate_latents(one, prompts, seeds, settings=settings, batch=clips)
                if decode:
                    to_frames(one.pipeline.codec.decode(latents))

            return work

        return paired_ratio(lambda _: make(model, of_teacher), lambda _: make(student, Settings.of(student)), rounds)

    text = Encoded(base.pipeline.text, [*prompts, recipe.negative_prompt, base.defaults.negative_prompt])
    alone = replace(base, pipeline=replace(base.pipeline, text=text))
    return {"denoising": measure(alone, decode=False), "whole": measure(base, decode=True)}
