"""The paper's contribution: how samples, and frames, lie to one another, matched by a relational KL.

Front to back::

    latents --pool--> features --relation_matrix--> S --relational_kl--> one value a row

DMD moves each coordinate of x against ``fake - real``. Here the same is done to the matrix S of pairwise
cosines: it is moved against Delta_S = S_fake - S_real (Eq. 7), through the KL of Eq. 8. The *frame* level
compares the frames within each video, the *batch* level the videos of the global batch. Gradients flow to
``x`` only. Where the features have a single channel every cosine is +1 or -1, and the gradient vanishes.

Equation numbers are those of the CoDMD paper; `docs/paper.md` lists which equation lives where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from codmd.errors import UserError

Latents = Float[Tensor, "batch channels frames height width"]
FORMS = ("residual", "direct", "mse")


def relational_loss(
    x: Latents,
    real: Latents,
    fake: Latents,
    *,
    tau: float = 0.1,
    batch_weight: float = 0.1,
    frame_weight: float = 0.1,
    form: str = "residual",
    pool_grid: int = 1,
    group: dist.ProcessGroup | None = None,
    release_batch_scaling: bool = False,
) -> Float[Tensor, ""]:
    """What CoDMD adds to a DMD loss: lambda_batch L_batch + lambda_frame L_frame (Eq. 11).

    ``x`` is the student's clean sample with its graph, ``real`` the guided teacher's x0-prediction and
    ``fake`` the fake network's, all latents [B, C, F, H, W]. DMD has them at hand, so a trainer changes by::

        loss = dmd_loss + codmd.relational_loss(x, real, fake)

    Under ``torch.distributed`` with averaged gradients (DDP, FSDP) the gradient is that of the whole batch on
    one device, at any world size; ``group`` is the data-parallel group. The batch part of the value is the
    global one on every rank; the frame part is each rank's own, since it needs no communication: average it
    for a log. For gradient accumulation see `gradient_at` and `replay`.
    """
    for name, weight in (("batch_weight", batch_weight), ("frame_weight", frame_weight)):
        if not (weight >= 0 and math.isfinite(weight)):
            raise UserError(f"relational loss: {name} must be a number from 0 up, got {weight}: try 0.1")
    _check(x, real, fake, tau, form)
    loss = frame_weight * frame_relation_loss(x, real, fake, tau=tau, form=form, pool_grid=pool_grid).mean()
    if batch_weight:  # without weight there is nothing to gather for
        rows = batch_relation_loss(
            x,
            real,
            fake,
            tau=tau,
            form=form,
            pool_grid=pool_grid,
            group=group,
            release_batch_scaling=release_batch_scaling,
        )
        loss = loss + batch_weight * rows.mean()
    return loss


def frame_relation_loss(
    x: Latents, real: Latents, fake: Latents, *, tau: float = 0.1, form: str = "residual", pool_grid: int = 1
) -> Float[Tensor, " batch"]:
    """Frame level, Eq. 10 before its mean over samples: the frames of each video. Uses no collective."""
    _check(x, real, fake, tau, form)
    S_stu, S_real, S_fake = (relation_matrix(pool_frames(z, pool_grid)) for z in (x, real.detach(), fake.detach()))
    return relational_kl(S_stu, S_real, S_fake, tau, form).mean(dim=-1)


def batch_relation_loss(
    x: Latents,
    real: Latents,
    fake: Latents,
    *,
    tau: float = 0.1,
    form: str = "residual",
    pool_grid: int = 1,
    group: dist.ProcessGroup | None = None,
    release_batch_scaling: bool = False,
) -> Float[Tensor, " rows"]:
    """Batch level, one value per row of the global batch, the same on every rank; the mean is Eq. 9.

    Only pooled features cross the network, C numbers a sample. Their gradient is scaled such that its
    *average* over ranks is the gradient of the global loss (R11). The authors' release leaves that factor
    out, so that its batch term is 1/world-size of the written one: ``release_batch_scaling`` does the same.
    """
    _check(x, real, fake, tau, form)
    features = torch.stack([pool_samples(z, pool_grid) for z in (x, real.detach(), fake.detach())], dim=1)
    features = gather_samples(features, group, averaged=not release_batch_scaling)
    S_stu, S_real, S_fake = relation_matrix(features.transpose(0, 1))
    return relational_kl(S_stu, S_real, S_fake, tau, form)


def pool_samples(x: Latents, grid: int = 1) -> Float[Tensor, "batch features"]:
    """One vector a video: the mean over frames and space (R3), in float32 or better; see `pool_frames`."""
    return x.mean(dim=(2, 3, 4), dtype=_precision(x)) if grid == 1 else pool_frames(x, grid).mean(dim=1)


def pool_frames(x: Latents, grid: int = 1) -> Float[Tensor, "batch frames features"]:
    """One vector a frame: the mean over space (R3), in float32 or better.

    That mean doesn't say where something is: an object that crosses a plain background leaves it as it was. With
    `grid` = n, not the paper's, each of n x n cells has a mean of its own, and the vector n² C entries.
    """
    if grid == 1:
        return x.mean(dim=(3, 4), dtype=_precision(x)).transpose(1, 2)
    if not 1 <= grid <= min(x.shape[3:]):
        raise UserError(
            f"relations: pool_grid must be from 1 to {min(x.shape[3:])} for latents of this size, got {grid}"
        )
    frames = x.to(_precision(x)).transpose(1, 2)
    return torch.nn.functional.adaptive_avg_pool2d(frames.flatten(0, 1), grid).reshape(*frames.shape[:2], -1)


def relation_matrix(features: Float[Tensor, "*lead n channels"]) -> Float[Tensor, "*lead n n"]:
    """Pairwise cosines, S_ij = <f_i, f_j> / (|f_i| |f_j|), in float32 or better.

    A zero vector has no direction: its cosines are 0 and so is its gradient.
    """
    unit, has_direction = _normalise(features.to(_precision(features)))
    # A product and a sum rather than a matmul, which autocast and TF32 would round.
    cosines = (unit.unsqueeze(-2) * unit.unsqueeze(-3)).sum(dim=-1)
    # A vector's cosine with itself is a constant; computed, it would be one plus rounding, with a gradient.
    itself = torch.eye(cosines.shape[-1], dtype=torch.bool, device=cosines.device)
    return torch.where(itself, has_direction.unsqueeze(-1).to(cosines.dtype), cosines)


def relational_kl(
    S_stu: Float[Tensor, "*lead n n"],
    S_real: Float[Tensor, "*lead n n"],
    S_fake: Float[Tensor, "*lead n n"],
    tau: float = 0.1,
    form: str = "residual",
) -> Float[Tensor, "*lead n"]:
    """The relational loss of each row; its mean over rows is Eq. 12.

    - ``residual``: KL(softmax(sg[S_stu - Delta_S] / tau) || softmax(S_stu / tau)), Eq. 8, with Delta_S of
      Eq. 7; its gradient with respect to S_stu is (P_stu - P_tgt) / (N tau), Eq. 15;
    - ``direct``: KL(softmax(S_real / tau) || softmax(S_stu / tau)), without a score difference (R12);
    - ``mse``: 1/2 (S_stu - sg[S_stu - Delta_S])^2, mean over entries: what the appendix rejects (R13).
    """
    _check_form(tau, form)
    S_real, S_fake = S_real.detach(), S_fake.detach()
    target = S_real if form == "direct" else S_stu.detach() - (S_fake - S_real)
    if form == "mse":
        return 0.5 * (S_stu - target).square().mean(dim=-1)
    log_target = torch.log_softmax(target / tau, dim=-1)
    log_student = torch.log_softmax(S_stu / tau, dim=-1)
    return (log_target.exp() * (log_target - log_student)).sum(dim=-1)


def relation_residual(real: Latents, fake: Latents, pool_grid: int = 1) -> Float[Tensor, " batch"]:
    """The largest |Delta_S| between frames, for each video: what is left to learn, how far Eq. 20 holds."""
    S_fake, S_real = (relation_matrix(pool_frames(z.detach(), pool_grid)) for z in (fake, real))
    delta = S_fake - S_real
    return delta.abs().amax(dim=(-2, -1))


def pairwise_diversity(
    features: Float[Tensor, "n channels"], group: dist.ProcessGroup | None = None
) -> Float[Tensor, ""]:
    """D(Q) = E d(Z, Z') of Proposition 3 with d = 1 - cosine, unbiased: the mean over pairs of samples.

    A measure, without gradient, of this process's samples, or of a whole group's if that is given.
    """
    features = features.detach()
    if group is not None:
        features = gather_samples(features, group)
    n = features.shape[0]
    distance = 1 - relation_matrix(features)
    return (distance.sum() - distance.diagonal().sum()) / max(n * (n - 1), 1)


def gather_samples(
    features: Float[Tensor, "batch *dims"], group: dist.ProcessGroup | None = None, *, averaged: bool = True
) -> Float[Tensor, "rows *dims"]:
    """The rows of all ranks in rank order; in one process, the rows as they are.

    For losses that every rank computes alike from the gathered rows, and whose gradients are then averaged
    over the ranks. Each rank gets the gradient of its own rows times the world size, by which the averaging
    divides again; ``averaged=False`` leaves the factor out. The backward pass needs no communication.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return features
    _check_even(features, group)
    return _GatherSamples.apply(features, group, averaged)


def gradient_at(
    loss: Callable[[Tensor], Tensor], x: Float[Tensor, "batch *dims"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "batch *dims"]]:
    """First pass of exact accumulation: the value of ``loss(x)`` and dL/dx for all micro-batches at once.

    A batch matrix couples the micro-batches, so their losses can't be summed one by one. But the loss sees
    the weights through x alone: generate every micro-batch without a graph, concatenate them, get dL/dx here,
    split it, and `replay` each part through a second forward. The weights' gradients add up to those of one
    large batch::

        with torch.no_grad():
            x = torch.cat([generate(part) for part in parts])
        value, gradient = gradient_at(lambda x: codmd.relational_loss(x, real, fake), x)
        for part, part_gradient in zip(parts, gradient.split([len(part) for part in parts])):
            replay(generate(part), part_gradient)
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = loss(x)
        (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


def replay(x: Float[Tensor, "batch *dims"], gradient: Float[Tensor, "batch *dims"]) -> None:
    """Second pass of exact accumulation: send a micro-batch's dL/dx into the weights that made its ``x``."""
    if x.shape != gradient.shape:
        raise UserError(
            f"replay: x has shape {tuple(x.shape)} but its gradient {tuple(gradient.shape)}: "
            "split the gradient as the batch was split"
        )
    x.backward(gradient.to(x.dtype))


class _GatherSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, group: dist.ProcessGroup | None, averaged: bool) -> Tensor:
        world = dist.get_world_size(group)
        ctx.rows = slice(dist.get_rank(group) * len(features), (dist.get_rank(group) + 1) * len(features))
        ctx.scale = world if averaged else 1
        features = features.contiguous()
        rows = [torch.empty_like(features) for _ in range(world)]
        dist.all_gather(rows, features, group=group)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.scale * gradient[ctx.rows], None, None


def _normalise(
    vectors: Float[Tensor, "*lead n channels"],
) -> tuple[Float[Tensor, "*lead n channels"], Bool[Tensor, "*lead n"]]:
    """Unit vectors, and which of them have a direction at all.

    Divided by its largest entry first, a vector's square neither overflows nor vanishes. The scale needs no
    gradient, for the result doesn't depend on it. Divided by infinity, a zero vector stays zero, and its
    gradient is zero.
    """
    finfo = torch.finfo(vectors.dtype)
    scale = vectors.detach().abs().amax(dim=-1, keepdim=True)
    nonzero = scale > finfo.tiny / finfo.eps
    vectors = vectors / torch.where(nonzero, scale, torch.inf)
    length = torch.where(nonzero, vectors.square().sum(dim=-1, keepdim=True), 1.0).sqrt()
    return vectors / length, nonzero.squeeze(-1)


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(x: Tensor, real: Tensor, fake: Tensor, tau: float, form: str) -> None:
    _check_form(tau, form)
    for name, latents in (("x", x), ("real", real), ("fake", fake)):
        if latents.ndim != 5 or latents.shape != x.shape:
            raise UserError(
                f"relational loss: {name} has shape {tuple(latents.shape)}, expected [B, C, F, H, W] like x "
                f"{tuple(x.shape)}: pass latents of one shape"
            )


def _check_form(tau: float, form: str) -> None:
    if form not in FORMS:
        raise UserError(f"relational loss: unknown form {form!r}, expected one of {', '.join(FORMS)}")
    if not (tau > 0 and math.isfinite(tau)):
        raise UserError(f"relational loss: tau must be above 0, got {tau}: the paper uses 0.1")


def _check_even(features: Tensor, group: dist.ProcessGroup | None) -> None:
    """Averaging weighs all ranks alike, and a gather of unlike shapes may hang: both need even batches."""
    size = torch.tensor(len(features), device=features.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    counts = torch.stack(sizes).tolist()
    if len(set(counts)) > 1:
        raise UserError(
            f"batch relations: ranks hold {counts} samples, expected as many on each: "
            "make the global batch a multiple of the world size"
        )
