"""The same run on any mesh of ranks and at any accumulation: the same streams, losses and weights (promise 2).

One launch of four processes walks six meshes, each with accumulation 1, 2 and 4, over 20 steps in fp32.
"""

import hashlib
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_runs import TinyRuns, runs
from many_ranks import joined, launch
from torch.distributed.tensor import DTensor, distribute_tensor

from codmd.config import ParallelConfig
from codmd.engine import checkpoint
from codmd.engine.assembly import assemble, load_base
from codmd.engine.ranks import Ranks, meshed
from codmd.networks.sharding import whole

MESHES = {
    "single": (1, 1, 1),
    "replicate 2": (2, 1, 1),
    "shard 2": (1, 2, 1),
    "shard 4": (1, 4, 1),
    "replicate 2 x shard 2": (2, 2, 1),
    "shard 2 x context 2": (1, 2, 2),
}
ACCUMULATIONS = (1, 2, 4)
PART = {"loss/batch": 0.1, "loss/frame": 0.1}
STEPS, BATCH, RATE = 20, 16, 1e-5
FULL = [("full", mesh, accumulation) for mesh in MESHES for accumulation in ACCUMULATIONS]
ADAPTERS = [
    ("adapter", mesh, accumulation) for mesh in ("single", "shard 2", "shard 2 x context 2") for accumulation in (1, 2)
]
CELLS = FULL + ADAPTERS


def walk(rank: int, folder: str, teacher: Path) -> dict:
    runs = TinyRuns(teacher)
    found = {}
    for name, degrees in MESHES.items():
        world = degrees[0] * degrees[1] * degrees[2]
        if rank >= world:
            continue
        if world > 1:
            joined(rank, world, name, folder)
        for mode, accumulation in [(mode, number) for mode, mesh, number in CELLS if mesh == name]:
            replicate, shard, context = degrees
            micro = BATCH // (replicate * shard) // accumulation
            recipe = runs.recipe(
                f"parallel.replicate={replicate}", f"parallel.shard={shard}", f"parallel.context={context}",
                f"train.batch={BATCH}", f"train.micro_batch={micro}", f"train.iterations={STEPS}",
                f"train.student_lr={RATE}", f"train.fake_lr={RATE}", "train.ema_decay=0.9", "rollout.exit=per_sample",
                f"mode={mode}", "adapter.rank=2", "adapter.base_dtype=fp32", "adapter.final_layers=true",
            )  # fmt: skip
            ranks = meshed(ParallelConfig(**vars(recipe.parallel)), torch.device("cpu")) if world > 1 else Ranks()
            found[mode, name, accumulation] = train(recipe, ranks)
        if name == "shard 2":
            found["sharded"] = sharded(runs, Path(folder) / "run")
        if world > 1:
            dist.destroy_process_group()
    return found


def sharded(runs: TinyRuns, out: Path) -> dict[str, float | str]:
    """What a sharded network answers with its average, and after that; a learning curve in bf16; its file."""
    recipe = runs.recipe("train.batch=4", "train.ema_decay=0.9", "train.student_lr=1e-2", "train.student_every=1")
    ranks = meshed(ParallelConfig(shard=2), torch.device("cpu"))
    trainer, _ = assemble(recipe, load_base(recipe, ranks), ranks=ranks)
    for _ in range(2):
        trainer.iterate()
    student, alone, part = trainer.roles.student, runs.base().network, trainer.parts()[0]
    question = part.draws.noise("x"), torch.full((len(part.ids),), 0.7), part.text
    found = {}
    with torch.no_grad():
        for name, of in (("average", trainer.ema.average), ("weights", student.learned())):
            alone.transformer.load_state_dict({n: whole(t.detach()) for n, t in of.items()})
            with trainer.ema.applied() if name == "average" else nullcontext():
                found[name] = float((student.velocity(*question) - alone.velocity(*question)).norm())
            found[f"size of {name}"] = float(alone.velocity(*question).norm())
    folder = checkpoint.save(out, trainer, {"kind": "student"}, None)
    found["class"] = json.loads((folder / "student" / "config.json").read_text())["_class_name"]
    rounded = runs.recipe("train.precision=bf16", "train.batch=4", "validation.every=2", "validation.prompts=3")
    trainer, curve = assemble(rounded, load_base(rounded, ranks), score=runs.score, ranks=ranks)
    found["dynamic degree"] = curve.student(trainer.roles.student, None)["dynamic_degree"]
    found["teacher's"] = curve.teacher(out / "reference")["dynamic_degree"]
    return found


def train(recipe, ranks: Ranks) -> dict:
    trainer, _ = assemble(recipe, load_base(recipe, ranks), ranks=ranks)
    drift(trainer.roles.fake.learned())
    streams, losses = {}, []
    for _ in range(STEPS):
        for part in trainer.parts():
            for i, noise, length, last in zip(
                part.ids, part.draws.noise("rollout 0"), part.text.lengths, part.exits, strict=True
            ):
                digest = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
                streams[i] = (digest, int(length), int(last))
        record = trainer.iterate()
        losses.append({name: value for name, value in record.items() if name.startswith(("loss/", "residual/"))})
    tensors = {
        "student": trainer.roles.student.learned(),
        "fake": trainer.roles.fake.learned(),
        "ema": trainer.ema.average,
    }
    weights = {role: {name: whole(t.detach()).clone() for name, t in of.items()} for role, of in tensors.items()}
    return {"streams": streams, "losses": losses, "weights": weights}


@torch.no_grad()
def drift(weights: dict[str, torch.nn.Parameter]) -> None:
    """Moves a network away from the teacher, so that losses are not made of rounding."""
    for number, weight in enumerate(weights.values()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        noise *= 0.3 / (noise[0].numel() ** 0.5 if noise.ndim > 1 else 1)
        spread = isinstance(weight, DTensor)
        weight += distribute_tensor(noise, weight.device_mesh, weight.placements) if spread else noise


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return launch(4, walk, str(tmp_path_factory.mktemp("stores")), runs.folder)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell)))
def test_the_streams_do_not_depend_on_who_works_on_a_sample(found: list[dict], cell: tuple) -> None:
    reference = found[0]["full", "single", 1]["streams"]
    together = {}
    for of_rank in found:
        if cell in of_rank:
            together |= of_rank[cell]["streams"]
    assert together == reference and len(reference) == STEPS * BATCH


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell)))
def test_losses_and_weights_agree(found: list[dict], cell: tuple) -> None:
    mode, mesh, _ = cell
    reference, ours = found[0][mode, "single", 1], found[0][cell]
    close = 1e-5 if "context" in mesh else 1e-6
    for step, (these, those) in enumerate(zip(ours["losses"], reference["losses"], strict=True)):
        assert these.keys() == those.keys()
        for name, value in those.items():
            # A part of the student's loss counts with its weight; a matrix' entry is on the scale of a cosine.
            part = those.get("loss/student", 0.0) / PART.get(name, math.inf)
            scale = 1.0 if name.startswith("residual/") else part
            assert these[name] == pytest.approx(value, rel=close, abs=close * scale), (step, name)
    for role, weights in reference["weights"].items():
        gap = torch.stack([(ours["weights"][role][n] - w).norm() for n, w in weights.items()]).norm()
        assert gap / torch.stack([w.norm() for w in weights.values()]).norm() < close, role


def test_every_rank_reports_the_same_numbers(found: list[dict]) -> None:
    for cell in CELLS:
        records = [of_rank[cell]["losses"] for of_rank in found if cell in of_rank]
        assert all(record == records[0] for record in records)


def test_a_sharded_network_answers_with_the_weights_that_it_has(found: list[dict]) -> None:
    for of_rank in found[:2]:
        seen = of_rank["sharded"]
        for name in ("average", "weights"):
            assert seen[name] < 1e-5 * seen[f"size of {name}"], name
        assert seen["class"] == "WanTransformer3DModel"
        assert seen["dynamic degree"] > 0 and seen["teacher's"] > 0
