"""What an iteration calls: this package's schedule against that of the authors' release, counted and timed.

Here the rollout stops at the exit, and the fake network learns the x that the student's turn made (Algorithm 1, R15).
The release simulates every step but the last whatever the exit, picks one of the noisy clips and predicts from it; and
it rolls out anew for the fake network, in the student's turns too. In forward-equivalents a sample, with four steps:

    here:         2.5 + 2 + 1 + 2 + (1 + 2) = 10.5 in the student's turn, 2.5 + (1 + 2) = 5.5 in each other iteration
    the release:  4 + 2 + 1 + 2 + (4 + 1 + 2) = 16 in the student's turn, 4 + (1 + 2) = 7 in each other iteration

which over five iterations are 32.5 and 44.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.timing import Ratio, Timed, paired_ratio
from bench.training import trainer
from codmd import flow
from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.engine.loop import Roles, Trainer
from codmd.engine.meter import Evaluations
from codmd.models import Model
from codmd.networks import TextCondition, WanNetwork
from codmd.objectives import Predictions, build, flow_mse, total
from codmd.recipe import Recipe


class Schedule(Protocol):
    """Something that goes from iteration to iteration: a trainer, or the release's way of being one."""

    recipe: Recipe
    roles: Roles
    step: int

    def iterate(self) -> Any: ...


class Release:
    """A trainer's networks, moved by the release's schedule with the same objective, optimizers and batch.

    Only what the schedule asks for: no guard, no record, no average of weights.
    """

    def __init__(self, of: Trainer) -> None:
        self.recipe, self.roles, self.prompts = of.recipe, of.roles, of.prompts
        self.latent_shape, self.device, self.step = of.latent_shape, of.device, 0
        self.objective = build(self.recipe.objective)
        self.student = self._optimizer(self.roles.student, self.recipe.train.student_lr)
        self.fake = self._optimizer(self.roles.fake, self.recipe.train.fake_lr)

    def iterate(self) -> None:
        recipe = self.recipe
        ids = sample_ids(self.step, recipe.train.batch)
        draws = Draws(recipe.seed, self.step, ids, self.latent_shape, self.device)
        text = self.prompts.select(prompt_indices(recipe.seed, ids, len(self.prompts))).to(self.device)
        if self.step % recipe.train.student_every == 0:
            x = self.generate(text, draws, "rollout")
            self._update(self.student, total(self.objective(self.predict(x, text, draws))))
        with torch.no_grad():
            x = self.generate(text, draws, "rollout for the fake network")
        x_t, t, eps = self._noised(x, draws, "fake")
        velocity = self._call(self.roles.fake.velocity, x_t, t, text)
        self._update(self.fake, flow_mse(velocity.float(), x, eps).mean())
        self.step += 1

    def generate(self, text: TextCondition, draws: Draws, purpose: str) -> Tensor:
        """x from the noisy clip of each sample's exit, once those of all exits are there."""
        config, predict = self.recipe.rollout, self.roles.student.x0
        times = torch.tensor(config.steps, device=self.device)
        noisy = [draws.noise(f"{purpose} 0")]
        with torch.no_grad():
            for j in range(len(times) - 1):
                x = self._call(predict, noisy[j], times[j].expand(len(noisy[j])), text)
                noisy.append(flow.add_noise(x, draws.noise(f"{purpose} {j + 1}"), times[j + 1]))
        exits = draws.exits(len(times), shared=config.exit == "shared")
        picked = torch.stack(noisy)[exits, torch.arange(len(exits), device=self.device)]
        return self._call(predict, picked, times[exits], text)

    @torch.no_grad()
    def predict(self, x: Tensor, text: TextCondition, draws: Draws) -> Predictions:
        """What teacher and fake network make of x with fresh noise."""
        x_t, t, _ = self._noised(x.detach(), draws, "student", shared=self.recipe.renoise.mode == "shared")
        real, fake = (self._call(role.x0, x_t, t, text) for role in (self.roles.teacher, self.roles.fake))
        return Predictions(x=x, x_t=x_t, t=t, real=real, fake=fake)

    def _noised(self, x: Tensor, draws: Draws, role: str, *, shared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        config, eps = self.recipe.renoise, draws.noise(f"renoise {role}")
        t = flow.renoise_times(draws.uniform(f"t {role}", shared=shared), config.shift, config.low, config.high)
        return flow.add_noise(x, eps, t), t, eps

    def _call(self, network: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # A context for each call: autocast would give a call with gradients the weights cast in one without.
        bf16 = self.recipe.train.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return network(*inputs)

    def _optimizer(self, network: WanNetwork, lr: float) -> torch.optim.Optimizer:
        config, learned = self.recipe.train, [p for p in network.parameters() if p.requires_grad]
        return torch.optim.AdamW(learned, lr=lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)

    def _update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.recipe.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


SHARED = "rollout.exit=shared"  # with an exit for each sample, the latest of a batch decides what it costs


def balanced(recipe: Recipe) -> list[int]:
    """The first iterations that make whole cycles with every exit alike.

    As many cycles as there are exits: each exit occurs in one of the student's turns, and equally often in the other
    iterations. Their mean is the expectation over exits, exactly.
    """
    exits, every = len(recipe.rollout.steps), recipe.train.student_every
    wanted = {(turn, exit): 1 if turn else every - 1 for turn in (True, False) for exit in range(exits)}
    found: list[int] = []
    for step in count():
        drawn = Draws(recipe.seed, step, (0,), (1,), torch.device("cpu")).exits(exits, shared=True)
        kind = (step % every == 0, int(drawn))
        if wanted[kind]:
            wanted[kind] -= 1
            found.append(step)
        if len(found) == exits * every:
            break
    return found


def evaluations(one: Schedule) -> float:
    """Forward-equivalents a sample in a cycle, counted as the networks are called; the mean over exits."""
    roles, steps = one.roles, balanced(one.recipe)
    counter = Evaluations([roles.student, roles.teacher.network, roles.fake])
    for step in steps:
        turn(one, step)()
    counter.close()
    cycles = len(steps) / one.recipe.train.student_every
    return counter.total / (one.recipe.train.batch * cycles)


def evaluations_of_both(base: Model, *overrides: str) -> tuple[float, float]:
    """Here, and in the release; two samples tell as much as many."""
    ours, theirs = (trainer(base, "codmd", *overrides, "train.batch=2", SHARED) for _ in range(2))
    return evaluations(ours), evaluations(Release(theirs))


def against_release(base: Model, rounds: int, *overrides: str) -> Ratio:
    """Seconds here over seconds in the release, iteration by iteration in turns; a pair is a sum over all exits."""
    ours, theirs = (trainer(base, "codmd", *overrides, SHARED) for _ in range(2))
    release, steps = Release(theirs), balanced(ours.recipe)
    return paired_ratio(along(ours, steps), along(release, steps), rounds, parts=len(steps))


def along(one: Schedule, steps: Sequence[int]) -> Callable[[int], Timed]:
    """Iterations by their place in `steps`, which begin again at its end."""
    return lambda number: turn(one, steps[number % len(steps)])


def turn(one: Schedule, step: int) -> Timed:
    def work() -> None:
        one.step = step
        one.iterate()

    return work
