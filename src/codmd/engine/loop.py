"""Algorithm 1, for any objective: the student makes x and is moved; the fake network learns x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codmd import flow
from codmd.data.prompts import EncodedPrompts
from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.engine.ema import Ema
from codmd.engine.guard import Guard
from codmd.engine.learner import Learner
from codmd.engine.tracking import Clock, residuals
from codmd.networks import GuidedTeacher, TextCondition, WanNetwork
from codmd.objectives import Predictions, Term, build, flow_mse, total
from codmd.recipe import Recipe
from codmd.rollout import rollout


@dataclass(frozen=True)
class Roles:
    """The three networks. Student and fake start as the teacher (or the student as another student)."""

    student: WanNetwork
    teacher: GuidedTeacher
    fake: WanNetwork


class Trainer:
    """All that changes in a run, and the iteration that changes it."""

    def __init__(
        self, recipe: Recipe, roles: Roles, prompts: EncodedPrompts, latent_shape: tuple[int, int, int, int]
    ) -> None:
        train = recipe.train
        self.recipe, self.roles, self.prompts, self.latent_shape = recipe, roles, prompts, latent_shape
        self.student = Learner(roles.student, train.student_lr, train)
        self.fake = Learner(roles.fake, train.fake_lr, train)
        self.ema = Ema(roles.student, train.ema_decay, train.ema_start) if train.ema_decay else None
        self.objective = build(recipe.objective)
        self.guard = Guard()
        self.step = 0
        self.device = next(roles.student.parameters()).device

    def iterate(self) -> dict[str, Any]:
        """Algorithm 1's loop body, and a record of it. The student's turn is every step that `student_every`
        divides, the first among them; the fake network learns at every step, from the same x (R15)."""
        recipe, step, clock = self.recipe, self.step, Clock(self.device)
        ids = sample_ids(step, recipe.train.batch)
        draws = Draws(recipe.seed, step, ids, self.latent_shape, self.device)
        is_student_turn = step % recipe.train.student_every == 0
        exits = draws.exits(len(recipe.rollout.steps), shared=recipe.rollout.exit == "shared")
        record: dict[str, Any] = {"exit": exits.float().mean()}
        with clock("data"):
            text = self.prompts.select(prompt_indices(recipe.seed, ids, len(self.prompts))).to(self.device)

        with clock("rollout"), torch.set_grad_enabled(is_student_turn):
            x = self.rollout(text, draws, exits)
        if is_student_turn:
            predictions = self.predict(x, text, draws, clock)
            terms = self.objective(predictions)
            record |= self.backward_student(terms, clock) | residuals(predictions.real, predictions.fake)
            record["t/student"] = predictions.t.mean()
        record |= self.backward_fake(x.detach(), text, draws, clock)

        # Both gradients depend on the weights before either update: a step changes all it should, or nothing.
        record = {name: float(value) for name, value in record.items()}
        refusal = self.guard.refusal(step, ids, record)
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
        learned = {"student_updates": self.student.updates, "fake_updates": self.fake.updates}
        return {"step": step, **record, **learned, **clock.seconds, "refused": refusal}

    def rollout(self, text: TextCondition, draws: Draws, exits: Tensor) -> Tensor:
        """x ← G(z, T), stopped at the step's exit."""
        student = self.in_precision(self.roles.student.x0)
        noise = draws.noise("rollout 0")
        steps = self.recipe.rollout.steps
        return rollout(student, noise, text, steps, lambda j: draws.noise(f"rollout {j}"), exits)

    @torch.no_grad()
    def predict(self, x: Tensor, text: TextCondition, draws: Draws, clock: Clock) -> Predictions:
        """What teacher and fake network make of x with fresh noise (R9); the teacher with guidance (R5)."""
        config = self.recipe.renoise
        u = draws.uniform("t student", shared=config.mode == "shared")
        t = flow.renoise_times(u, config.shift, config.low, config.high)
        x_t = flow.add_noise(x.detach(), draws.noise("renoise student"), t)
        with clock("teacher"):
            real = self.in_precision(self.roles.teacher.x0)(x_t, t, text)
        with clock("fake"):
            fake = self.in_precision(self.roles.fake.x0)(x_t, t, text)
        return Predictions(x=x, x_t=x_t, t=t, real=real, fake=fake)

    def backward_student(self, terms: tuple[Term, ...], clock: Clock) -> dict[str, Any]:
        """The student's gradients, from whatever terms the objective has."""
        with clock("backward"):
            loss = total(terms)
            record = {"lr/student": self.student.rate, "gradient/student": self.student.backward(loss)}
        return {f"loss/{term.name}": term.values.detach().mean() for term in terms} | {
            "loss/student": loss.detach(),
            **record,
        }

    def backward_fake(self, x: Tensor, text: TextCondition, draws: Draws, clock: Clock) -> dict[str, Any]:
        """The fake network's gradients: flow matching on the student's x, without guidance (R14)."""
        config = self.recipe.renoise
        t = flow.renoise_times(draws.uniform("t fake"), config.shift, config.low, config.high)
        eps = draws.noise("renoise fake")
        with clock("fake"):
            velocity = self.in_precision(self.roles.fake.velocity)(flow.add_noise(x, eps, t), t, text)
            loss = flow_mse(velocity.float(), x, eps).mean()
        with clock("backward"):
            record = {"lr/fake": self.fake.rate, "gradient/fake": self.fake.backward(loss)}
        return {"loss/fake": loss.detach(), "t/fake": t.mean(), **record}

    def in_precision(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The call under autocast, when the recipe says bf16; weights stay fp32.

        One context for each call: within one, autocast would reuse in the call with gradients the weights
        that it cast in those without, and no gradient would reach them.
        """
        enabled = self.recipe.train.precision == "bf16"

        def cast(*args: Any) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
                return call(*args)

        return cast
