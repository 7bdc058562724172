"""The parts of a run, put together: three networks on however many ranks, prompts, and the learning curve's clips."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

from codmd.console import meter
from codmd.data.prompts import EncodedPrompts, load_prompts
from codmd.engine.loop import Roles, Trainer
from codmd.engine.meter import video_tokens
from codmd.engine.ranks import Ranks
from codmd.engine.validation import Score, Validation, mini_score
from codmd.errors import UserError
from codmd.models import Model, load_model, student_weights, weights_folder, with_shift
from codmd.networks import GuidedTeacher, WanNetwork
from codmd.networks.adapters import AdapterNetwork, base_state, reset, roles_of, share
from codmd.networks.precision import double_blocks
from codmd.networks.sharding import (
    compile_blocks,
    empty_transformer,
    fill,
    offload,
    read_into,
    recompute_blocks,
    shard,
    share_context,
)
from codmd.recipe import Recipe
from codmd.sampling import Settings


def load_base(recipe: Recipe, ranks: Ranks, given: Model | None = None) -> Model:
    """The teacher that the recipe names, or the one that is given; over several ranks no rank holds all of it."""
    base = given
    if ranks.mesh is not None:
        ref = recipe.model.base if given is None else str(given.folder)
        base = load_model(ref, str(ranks.device), network=partial(_spread, recipe=recipe, ranks=ranks, learns=False))
        base = base if given is None else replace(base, ref=given.ref)
    elif base is None:
        base = load_model(recipe.model.base, str(ranks.device))
    _check_teacher(base)
    if recipe.mode == "adapter" and given is None and ranks.mesh is None:
        base = replace(base, network=_adapted(base.network, recipe, ranks))  # nobody else needs it as it was
    return with_shift(base, recipe.model.teacher_shift)


def _check_teacher(base: Model) -> None:
    if base.kind != "teacher":
        raise UserError(f"model.base: {base.ref} is a student; a base is a teacher, --init takes students")


def assemble(
    recipe: Recipe, base: Model, init: str | None = None, score: Score | None = None, ranks: Ranks | None = None
) -> tuple[Trainer, Validation | None]:
    """The trainer, and the learning curve where the recipe wants one."""
    _check_teacher(base)
    if init is not None and recipe.mode == "adapter":
        raise UserError('--init: an adapter starts as the teacher; use mode = "full", or another model.base')
    settings = Settings.of(base, **vars(recipe.video))
    device = next(base.network.parameters()).device
    if ranks is None or ranks.mesh is None:
        ranks = Ranks(device=device)  # where the base is
    if recipe.mode == "adapter" and not isinstance(base.network, AdapterNetwork):
        base = replace(base, network=_adapted(copy.deepcopy(base.network), recipe, ranks))
    _check_tokens(base, settings.latent_shape(base), ranks)
    roles = _roles(recipe, base, ranks)
    base = replace(base, network=roles.teacher.network)
    if init is not None:
        read_into(roles.student.transformer.state_dict(), student_weights(init))
    curve = recipe.validation
    prompts = load_prompts(
        recipe.data.prompts,
        count=recipe.data.count,
        needed=recipe.train.iterations * recipe.train.batch,
        held_out_seed=recipe.data.held_out_seed,
        validation=curve.prompts if curve.every else 0,
    )
    with meter("encoding prompts", len(set(prompts.training)), shown=ranks.is_first) as advance:
        encoded = EncodedPrompts(base.pipeline.text, prompts.training, progress=lambda done, _: advance(done, ""))
    trainer = Trainer(recipe, roles, encoded, settings.latent_shape(base), ranks)
    if not curve.every:
        return trainer, None
    return trainer, Validation(recipe, base, prompts.validation, score or _score_for(recipe), ranks)


def _check_tokens(base: Model, latent_shape: tuple[int, int, int, int], ranks: Ranks) -> None:
    tokens = video_tokens(base.network.transformer.config, latent_shape)
    if tokens % ranks.context:
        raise UserError(f"parallel.context: {ranks.context} ranks cannot share {tokens} tokens a clip evenly")


def _roles(recipe: Recipe, base: Model, ranks: Ranks) -> Roles:
    """Student and fake network begin as the teacher."""
    teacher = base.network
    scale = recipe.model.guidance_scale_standard
    if recipe.train.precision == "fp64":
        base.pipeline.text.model.double()
    negative = base.pipeline.text.encode([recipe.model.negative_prompt]).to(ranks.device)
    if isinstance(teacher, AdapterNetwork):
        shared = roles_of(teacher)
        for role in (shared.student, shared.teacher, shared.fake):
            role.precision = recipe.train.precision
        return Roles(shared.student, GuidedTeacher(shared.teacher, negative, scale), shared.fake)
    if ranks.mesh is not None:
        folder = weights_folder(base.folder)
        student, fake = (_spread(folder, recipe=recipe, ranks=ranks, learns=True) for _ in range(2))
    else:
        # The base's own weights, under another name: how it computes here is this run's business.
        teacher = copy.copy(teacher)
        student, fake = copy.deepcopy(teacher), copy.deepcopy(teacher)
        if recipe.train.precision == "fp64":
            teacher = copy.deepcopy(teacher)
            for network in (student, teacher, fake):
                network.double()
            negative = negative.to(dtype=next(teacher.parameters()).dtype)
        for network in (student, teacher, fake):
            _arrange(network, recipe, ranks, learns=network is not teacher)
        if recipe.compute.offload_teacher:
            offload(teacher.transformer, ranks.device)
    for network in (student, fake):
        network.requires_grad_(True)
    for network in (student, teacher, fake):
        network.precision = recipe.train.precision
    return Roles(student, GuidedTeacher(teacher, negative, scale), fake)


def _adapted(network: WanNetwork, recipe: Recipe, ranks: Ranks) -> AdapterNetwork:
    """The teacher of a transformer that all roles share from now on."""
    teacher = share(network.transformer, recipe.adapter, recipe.seed).teacher
    _arrange(teacher, recipe, ranks, learns=True)
    return teacher


def _arrange(network: WanNetwork, recipe: Recipe, ranks: Ranks, *, learns: bool) -> None:
    """What is done to a network's blocks, adapters being in them already; the order is from the inside out."""
    if ranks.context_mesh is not None:
        share_context(network.transformer, ranks.context_mesh)
    if recipe.train.precision == "fp64":
        double_blocks(network.transformer)
    if learns and recipe.compute.checkpointing != "none":
        recompute_blocks(network, selective=recipe.compute.checkpointing == "selective")
    if recipe.compute.compile:
        compile_blocks(network.transformer)


def _spread(folder: Path, *, recipe: Recipe, ranks: Ranks, learns: bool) -> WanNetwork:
    """A network over all ranks: nothing is allocated before it is sharded, and each rank reads its own parts."""
    network = WanNetwork(empty_transformer(folder))
    adapts = recipe.mode == "adapter"
    if recipe.train.precision == "fp64":
        network.double()
    if adapts:
        teacher = _adapted(network, recipe, ranks)
        # A base in bf16 is stored as it is used; what is not, norms and adapters, is to stay in fp32.
        precision = "fp32" if recipe.adapter.base_dtype == "bf16" else recipe.train.precision
        shard(teacher.transformer, ranks.sharding_mesh, precision)
        fill(teacher.transformer, folder, ranks.device, state=lambda: base_state(teacher))
        reset(roles_of(teacher), recipe.seed)
        return teacher
    _arrange(network, recipe, ranks, learns=learns)
    network.requires_grad_(learns)
    waits = recipe.compute.offload_teacher and not learns and ranks.device.type == "cuda"
    shard(network.transformer, ranks.sharding_mesh, recipe.train.precision, offload=waits)
    fill(network.transformer, folder, ranks.device, waits=waits)
    return network


def _score_for(recipe: Recipe) -> Score:
    """The miniature's measures, which need its captions."""
    if recipe.data.prompts != "mini":
        raise UserError(
            "validation.every: the learning curve is measured on the miniature's captions, and data.prompts "
            f'is "{recipe.data.prompts}"; set validation.every = 0'
        )
    return mini_score
