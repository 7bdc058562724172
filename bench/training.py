"""A training step: CoDMD's against DMD's, and either against the network passes that it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.timing import Ratio, Timed, paired_ratio
from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.engine.assembly import assemble
from codmd.engine.loop import Trainer
from codmd.models import Model
from codmd.networks import TextCondition
from codmd.recipe import load_recipe


def trainer(base: Model, method: str, *overrides: str) -> Trainer:
    """The recipe `mini` as it is shipped, ready to take steps; no learning curve, few prompts to encode."""
    size = base.pipeline.size
    given = [
        f"objective.method={method}", f"model.base={base.ref}", "validation.every=0", "data.count=64",
        *(f"video.{key}={value}" for key, value in zip(("frames", "height", "width"), size, strict=True)),
        *overrides,
    ]  # fmt: skip
    return assemble(load_recipe("mini", given), base)[0]


def codmd_against_dmd(base: Model, cycles: int, *overrides: str) -> dict[str, Ratio]:
    """Iterations of two trainers in turns: those in which the student learns, and all of a cycle.

    Both draw the same prompts, noise, times and exits, so that a pair differs in the relational loss alone.
    Only the first of a cycle's iterations has one: over all of a cycle, what it costs is spread.
    """
    ours, theirs = trainer(base, "codmd", *overrides), trainer(base, "dmd", *overrides)
    every = ours.recipe.train.student_every

    def turn(one: Trainer, cycle: int, count: int) -> Timed:
        """The first `count` iterations of a cycle, from the iteration number that it begins with."""

        def steps() -> None:
            for number in range(cycle * every, cycle * every + count):
                one.step = number
                one.iterate()

        return steps

    return {
        "turn": paired_ratio(lambda n: turn(ours, n, 1), lambda n: turn(theirs, n, 1), cycles),
        "cycle": paired_ratio(lambda n: turn(ours, n, every), lambda n: turn(theirs, n, every), cycles),
    }


def step_against_passes(base: Model, rounds: int, method: str = "codmd", *overrides: str) -> Ratio:
    """A cycle of iterations against the bare networks' forwards and backwards in it, on the same shapes."""
    one = trainer(base, method, *overrides)
    every = one.recipe.train.student_every

    def cycle(number: int) -> Timed:
        def steps() -> None:
            for step in range(number * every, (number + 1) * every):
                one.step = step
                one.iterate()

        return steps

    def bare(number: int) -> Timed:
        passes = [bare_passes(one, step) for step in range(number * every, (number + 1) * every)]

        def steps() -> None:
            for some in passes:
                some()

        return steps

    return paired_ratio(cycle, bare, rounds)


def bare_passes(one: Trainer, step: int) -> Callable[[], None]:
    """The network calls of one iteration and nothing else: no noise drawn, no loss, no optimizer.

    Inputs are random tensors of the right shapes. The gradient that enters each backward is one too.
    """
    recipe, roles = one.recipe, one.roles
    ids = sample_ids(step, recipe.train.batch)
    text = one.prompts.select(prompt_indices(recipe.seed, ids, len(one.prompts))).to(one.device)
    draws = Draws(recipe.seed, step, ids, one.latent_shape, one.device)
    before_exit = int(draws.exits(len(recipe.rollout.steps), shared=recipe.rollout.exit == "shared").max())
    turn = step % recipe.train.student_every == 0
    x = torch.randn(len(ids), *one.latent_shape, device=one.device)
    twice, t = torch.cat([x, x]), torch.full((len(ids),), 0.5, device=one.device)
    both = TextCondition.cat([text, roles.teacher.negative.expand(len(text))])
    guided = roles.teacher.scale != 1.0

    def passes() -> None:
        student, fake, teacher = (roles.student, roles.fake, roles.teacher.network)
        with torch.no_grad():
            for _ in range(before_exit + (not turn)):
                student(x, t, text)
        if turn:
            made = student(x, t, text)
            with torch.no_grad():
                teacher(*((twice, torch.cat([t, t]), both) if guided else (x, t, text)))
                fake(x, t, text)
            made.backward(x.to(made.dtype))
            one.student.discard()
        learned = fake(x, t, text)
        learned.backward(x.to(learned.dtype))
        one.fake.discard()

    return passes
