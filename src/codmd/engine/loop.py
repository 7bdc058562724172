"""Algorithm 1, for any objective, on any number of ranks, with any accumulation.

The student makes x and is moved; the fake network learns x. A rank's share of the batch is worked on in parts
(micro-batches). A batch matrix couples all parts of all ranks, but the objective sees the student through x alone: so
every part is generated first, the exact gradient of the whole objective is formed at x, and each part's last forward
is then replayed and differentiated (`relations.gradient_at`). With a single part the first forward is kept instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codmd import flow
from codmd.data.prompts import EncodedPrompts
from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.engine.ema import Ema
from codmd.engine.guard import Guard, spoiled
from codmd.engine.learner import Learner
from codmd.engine.meter import Evaluations, Meter
from codmd.engine.ranks import Ranks
from codmd.engine.tracking import Clock, residuals
from codmd.errors import UserError
from codmd.networks import GuidedTeacher, TextCondition, WanNetwork
from codmd.objectives import Predictions, build, flow_mse, objective_gradient, total
from codmd.objectives.relational import in_space
from codmd.recipe import Recipe
from codmd.relations import replay
from codmd.rollout import simulate


@dataclass(frozen=True)
class Roles:
    """The three networks. Student and fake start as the teacher (or the student as another student)."""

    student: WanNetwork
    teacher: GuidedTeacher
    fake: WanNetwork


@dataclass(frozen=True)
class Part:
    """A micro-batch: samples that go through the networks together."""

    draws: Draws
    text: TextCondition
    exits: Tensor
    latest: int
    """The latest exit among the parts that other ranks work on meanwhile."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.draws.ids


@dataclass(frozen=True)
class Made:
    """What the student made of a part, and the input of the call that made it."""

    part: Part
    y: Tensor
    t: Tensor
    x: Tensor


class Trainer:
    """All that changes in a run, and the iteration that changes it."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        prompts: EncodedPrompts,
        latent_shape: tuple[int, int, int, int],
        ranks: Ranks | None = None,
    ) -> None:
        train = recipe.train
        self.recipe, self.roles, self.prompts, self.latent_shape = recipe, roles, prompts, latent_shape
        self.device = next(roles.student.parameters()).device
        self.ranks = ranks or Ranks(device=self.device)
        self.micro = part_size(recipe, self.ranks)
        self.student = Learner(roles.student, train.student_lr, train)
        self.fake = Learner(roles.fake, train.fake_lr, train)
        averaged = train.ema_decay or train.ema_power
        self.ema = Ema(roles.student, train.ema_decay, train.ema_start, train.ema_power) if averaged else None
        self.objective = build(recipe.objective, self.ranks.data_group)
        self.guard = Guard(seed=recipe.seed)
        networks = [roles.student, roles.teacher.network, roles.fake]
        self.evaluations = Evaluations(networks, recomputed=False)
        self.meter = Meter(roles.student.transformer.config, latent_shape, prompts.keys, self.device)
        self.step = 0

    def iterate(self) -> dict[str, Any]:
        """Algorithm 1's loop body, and a record of it. The student's turn is every step that `student_every`
        divides, the first among them; the fake network learns at every step, from the same x (R15)."""
        recipe, step, clock = self.recipe, self.step, Clock(self.device)
        begun, evaluated = time.perf_counter(), self.evaluations.total
        is_student_turn = step % recipe.train.student_every == 0
        with clock("data"):
            parts = self.parts()
        replays = is_student_turn and len(parts) > 1
        made = []
        for part in parts:
            with clock("rollout"), torch.set_grad_enabled(is_student_turn and not replays):
                made.append(self.generate(part))
        record: dict[str, Any] = {"exit": torch.cat([part.exits for part in parts]).float().mean()}
        watched = {"x": torch.cat([one.x.detach() for one in made])}
        if is_student_turn:
            seen = Predictions.join([self.predict(one, clock) for one in made])
            watched |= {"teacher": seen.real, "fake": seen.fake}
            record |= self.backward_student(made, seen, clock, replays=replays)
        learned, watched["fake's error"] = self.backward_fake(made, clock)
        record |= learned

        # Both gradients depend on the weights before either update: a step changes all it should, or nothing.
        # Every rank sees the same means, so that all refuse a step or none does.
        record = self.ranks.mean({name: float(value) for name, value in record.items()})
        if is_student_turn:
            config = recipe.objective
            _, real, fake = in_space(seen, config.space)
            record |= residuals(real, fake, self.ranks, config.pool_grid)
        ids = sample_ids(step, recipe.train.batch)
        own = [i for part in parts for i in part.ids]
        refusal = self.guard.refusal(step, record, lambda: spoiled(self.ranks, own, watched) or ids)
        with clock("optimizer"):
            if refusal is not None:
                self.student.discard()
                self.fake.discard()
            else:
                if is_student_turn:
                    self.student.update()
                    if self.ema is not None:
                        self.ema.update(self.student.updates)
                self.fake.update()
        self.step += 1
        updates = {"student_updates": self.student.updates, "fake_updates": self.fake.updates}
        refused = {"refused": None} if refusal is None else vars(refusal)
        speed = self.meter.record(
            seconds=time.perf_counter() - begun,
            # Ranks that share a sample each count all of it.
            evaluations=(self.evaluations.total - evaluated) / self.ranks.context,
            samples=recipe.train.batch,
        )
        return {"step": step, **record, **updates, **clock.seconds, **speed, **refused}

    def parts(self) -> list[Part]:
        """This rank's micro-batches. What is drawn for a sample does not depend on who works on it."""
        recipe, step, ranks = self.recipe, self.step, self.ranks
        ids = sample_ids(step, recipe.train.batch)
        everybody = self.draws(ids).exits(len(recipe.rollout.steps), shared=recipe.rollout.exit == "shared")
        everybody = everybody.unflatten(0, (ranks.data_size, -1, self.micro))  # [data rank, part, sample]
        mine = everybody[ranks.data_rank]
        own = ranks.share(ids)
        found = []
        for number, first in enumerate(range(0, len(own), self.micro)):
            some = tuple(own[first : first + self.micro])
            places = prompt_indices(recipe.seed, some, len(self.prompts))
            text = self.prompts.select(places).to(self.device, self.dtype)
            latest = int(everybody[:, number].max())
            found.append(Part(self.draws(some), text, mine[number].to(self.device), latest))
        return found

    def draws(self, ids: tuple[int, ...]) -> Draws:
        return Draws(self.recipe.seed, self.step, ids, self.latent_shape, self.device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.recipe.train.precision == "fp64" else torch.float32

    def generate(self, part: Part) -> Made:
        """x ← G(z, T), stopped at the step's exit; only the last call has a gradient."""
        draws, steps = part.draws, self.recipe.rollout.steps
        student = self.roles.student.x0
        y, t = simulate(
            student,
            draws.noise("rollout 0"),
            part.text,
            steps,
            lambda j: draws.noise(f"rollout {j}"),
            part.exits,
            latest=part.latest,
        )
        return Made(part, y, t, student(y, t, part.text))

    @torch.no_grad()
    def predict(self, made: Made, clock: Clock) -> Predictions:
        """What teacher and fake network make of x with fresh noise (R9); the teacher with guidance (R5)."""
        config, draws, text = self.recipe.renoise, made.part.draws, made.part.text
        u = draws.uniform("t student", shared=config.mode == "shared")
        t = flow.renoise_times(u, config.shift, config.low, config.high)
        x_t = flow.add_noise(made.x.detach(), draws.noise("renoise student"), t)
        with clock("teacher"):
            real = self.roles.teacher.x0(x_t, t, text)
        with clock("fake"):
            fake = self.roles.fake.x0(x_t, t, text)
        return Predictions(x=made.x.detach(), x_t=x_t, t=t, real=real, fake=fake)

    def backward_student(self, made: list[Made], seen: Predictions, clock: Clock, *, replays: bool) -> dict[str, Any]:
        """The student's gradients, from whatever terms the objective has."""
        with clock("backward"):
            gradient, terms = objective_gradient(self.objective, seen)
            # FSDP averages over all ranks, also over those that share a sample, whose gradients are parts of one sum.
            gradient = gradient * self.ranks.context
        for one, its_gradient in zip(made, gradient.split(self.micro), strict=True):
            x = one.x
            if replays:
                with clock("rollout"):
                    x = self.roles.student.x0(one.y, one.t, one.part.text)
            with clock("backward"):
                replay(x, its_gradient)
        record = {f"loss/{term.name}": term.values.mean() for term in terms}
        record |= {"loss/student": total(terms), "t/student": seen.t.mean()}
        return record | {"lr/student": self.student.rate, "gradient/student": self.student.clip()}

    def backward_fake(self, made: list[Made], clock: Clock) -> tuple[dict[str, Any], Tensor]:
        """The fake network's gradients, and each sample's loss: flow matching on the student's x, unguided (R14)."""
        config = self.recipe.renoise
        losses, times = [], []
        for one in made:
            draws, x = one.part.draws, one.x.detach()
            t = flow.renoise_times(draws.uniform("t fake"), config.shift, config.low, config.high)
            eps = draws.noise("renoise fake")
            with clock("fake"):
                velocity = self.roles.fake.velocity(flow.add_noise(x, eps, t), t, one.part.text)
                loss = flow_mse(flow.at_least_float32(velocity), x, eps)
            with clock("backward"):
                (loss.mean() * self.ranks.context / len(made)).backward()
            losses.append(loss.detach())
            times.append(t)
        each = torch.cat(losses)
        record = {"loss/fake": each.mean(), "t/fake": torch.cat(times).mean(), "lr/fake": self.fake.rate}
        return record | {"gradient/fake": self.fake.clip()}, each


def part_size(recipe: Recipe, ranks: Ranks) -> int:
    """Samples in a micro-batch; refused where batch, ranks and micro-batches don't go into one another."""
    batch = recipe.train.batch
    share, rest = divmod(batch, ranks.data_size)
    if rest:
        raise UserError(f"train.batch: {batch} samples cannot be shared evenly by {ranks.data_size} ranks")
    micro = recipe.train.micro_batch or share
    if share % micro:
        raise UserError(
            f"train.micro_batch: {micro} does not divide a rank's share of {share} samples "
            f"(batch {batch} over {ranks.data_size} ranks)"
        )
    return micro
