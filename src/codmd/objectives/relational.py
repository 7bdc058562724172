"""CoDMD and its ablations: DMD, and the relations between samples and between frames."""

from __future__ import annotations

import torch.distributed as dist

from codmd.flow import score_from_x0
from codmd.objectives.base import Latents, Predictions, Term
from codmd.objectives.config import ObjectiveConfig
from codmd.objectives.dmd import dmd
from codmd.relations import batch_relation_loss, frame_relation_loss


def codmd(
    predictions: Predictions,
    config: ObjectiveConfig,
    group: dist.ProcessGroup | None = None,
    *,
    levels: tuple[str, ...] = ("batch", "frame"),
    form: str = "residual",
) -> tuple[Term, ...]:
    """L_DMD + lambda_batch L_batch + lambda_frame L_frame (Eq. 11), or only some of its levels."""
    terms = dmd(predictions, config)
    inputs = in_space(predictions, config.space)
    if "batch" in levels:
        rows = batch_relation_loss(
            *inputs,
            tau=config.tau,
            form=form,
            pool_grid=config.pool_grid,
            group=group,
            release_batch_scaling=config.release_batch_scaling,
        )
        terms += (Term("batch", config.batch_weight, rows),)
    if "frame" in levels:
        videos = frame_relation_loss(*inputs, tau=config.tau, form=form, pool_grid=config.pool_grid)
        terms += (Term("frame", config.frame_weight, videos),)
    return terms


def in_space(predictions: Predictions, space: str) -> tuple[Latents, Latents, Latents]:
    """x, real and fake as the relation matrices are to see them (R2).

    In "score" the two predictions become scores. The student has none of its own: S_stu is built from x in
    either space, as in the paper's text.
    """
    p = predictions
    if space == "x0":
        return p.x, p.real, p.fake
    x_t = p.x_t.detach()
    return p.x, score_from_x0(x_t, p.real, p.t), score_from_x0(x_t, p.fake, p.t)
