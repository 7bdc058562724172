"""The student's objectives, by name: each a sum of named terms over tensors that a DMD step has anyway.

A new method is a new file with a function like `dmd` or `codmd`, its name in `METHOD_NAMES`, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist

from codmd.objectives.base import Objective, Predictions, Term, objective_gradient, total
from codmd.objectives.config import ObjectiveConfig
from codmd.objectives.dmd import dmd
from codmd.objectives.fake import flow_mse
from codmd.objectives.relational import codmd

__all__ = [
    "METHODS",
    "Objective",
    "ObjectiveConfig",
    "Predictions",
    "Term",
    "build",
    "flow_mse",
    "objective_gradient",
    "total",
]

METHODS: Mapping[str, Callable[..., tuple[Term, ...]]] = {
    "dmd": dmd,
    "codmd": codmd,
    "batch": partial(codmd, levels=("batch",)),
    "frame": partial(codmd, levels=("frame",)),
    "direct": partial(codmd, form="direct"),  # R12
    "mse": partial(codmd, form="mse"),  # R13
}


def build(config: ObjectiveConfig, group: dist.ProcessGroup | None = None) -> Objective:
    """The objective that ``config`` names; ``group`` is the data-parallel group that averages gradients."""
    return partial(METHODS[config.method], config=config, group=group)
