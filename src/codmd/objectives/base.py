"""What an objective takes and gives: predictions in, named terms out. None ever calls a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from codmd.relations import gradient_at

Latents = Float[Tensor, "batch channels frames height width"]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The tensors that a DMD step has computed anyway. Only ``x`` carries the student's graph."""

    x: Latents
    """The student's clean sample."""
    x_t: Latents
    """x with fresh noise, at time ``t``: what teacher and fake were shown."""
    t: Float[Tensor, " batch"]
    real: Latents
    """The teacher's guided x0-prediction at x_t (R5)."""
    fake: Latents
    """The fake network's x0-prediction at x_t, without guidance."""

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """Micro-batches as the one batch that they are parts of."""
        names = [field.name for field in fields(Predictions)]
        return Predictions(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


@dataclass(frozen=True)
class Term:
    """One part of a loss: ``weight`` times the mean of ``values``, kept apart for logs and guards."""

    name: str
    weight: float
    values: Float[Tensor, " rows"]


Objective = Callable[[Predictions], tuple[Term, ...]]


def total(terms: Sequence[Term]) -> Float[Tensor, ""]:
    """The loss that the terms add up to (Eq. 11)."""
    return torch.stack([term.weight * term.values.mean() for term in terms]).sum()


def objective_gradient(objective: Objective, predictions: Predictions) -> tuple[Latents, tuple[Term, ...]]:
    """dL/dx of an objective, and its terms without graph: the first pass of exact accumulation.

    The second is `codmd.relations.replay`, once for each micro-batch; see `codmd.relations.gradient_at`.
    """
    terms: list[Term] = []

    def loss(x: Tensor) -> Tensor:
        terms.extend(objective(replace(predictions, x=x)))
        return total(terms)

    _, gradient = gradient_at(loss, predictions.x)
    return gradient, tuple(replace(term, values=term.values.detach()) for term in terms)
