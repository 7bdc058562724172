"""What each command takes, and the one call it makes.

Bodies are thin, and import what they call only when they run, so that `codmd --help` needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

Flag = FlagCreatePairsOff[bool]
Repeated = UseAppendAction[tuple[str, ...]]
Model = Annotated[Positional[str], arg(metavar="MODEL")]
Folder = Annotated[Path, arg(metavar="DIR")]
OptionalFolder = Annotated[Path | None, arg(metavar="DIR")]
OptionalInt = Annotated[int | None, arg(metavar="INT")]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Distil the miniature with DMD and with CoDMD, measure both, and write the page that shows it."""

    out: Folder = Path("runs/demo")
    """Folder for the students, the videos and index.html."""
    quick: Flag = False
    """Seconds instead of minutes: shows that everything runs, proves nothing."""
    seed: int = 0
    """Seed of both students' runs."""

    def run(self) -> None:
        from codmd import demo

        demo.run(out=self.out, quick=self.quick, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Distil a teacher into a few-step student, as a recipe says."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """Name of a shipped recipe (mini), or the path of a .toml file."""
    overrides: Annotated[Repeated, arg(name="set", metavar="SECTION.KEY=VALUE")] = ()
    """Change one key of the recipe; may be given many times."""
    out: OptionalFolder = None
    """Folder of the run; by default runs/ and the recipe's name."""
    init: Annotated[str | None, arg(metavar="MODEL")] = None
    """Start the student from another student instead of the teacher."""
    allow_changes: Flag = False
    """Go on with a run although its recipe was another."""
    dry_run: Flag = False
    """Print the resolved recipe and stop."""

    def run(self) -> None:
        if self.dry_run:
            # The recipe alone: no model has to be on disk to see what a run would be.
            from codmd.recipe import load_recipe, to_toml

            print(to_toml(load_recipe(self.recipe, self.overrides)), end="")
            return
        from codmd.engine import distill

        distill.run(
            self.recipe,
            overrides=self.overrides,
            out=self.out,
            init=self.init,
            allow_changes=self.allow_changes,
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Make videos with a teacher or a student."""

    model: Model
    """"mini", a run's folder, a checkpoint, or a folder with a diffusers pipeline."""
    prompt: Repeated = ()
    """A prompt; may be given many times."""
    prompts: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with one prompt on each line."""
    out: Folder = Path("runs/samples")
    """Folder for the videos and their JSON files."""
    steps: OptionalInt = None
    """Sampling steps; by default the model's own."""
    seeds: int = 5
    """Videos of each prompt."""
    seed0: int = 0
    """The first of the seeds."""
    guidance: Annotated[float | None, arg(metavar="FLOAT")] = None
    """w in u + w(c - u); by default the model's own, 1 for a student."""
    frames: OptionalInt = None
    """Frames of a video; by default the model's own."""
    height: OptionalInt = None
    """Height in pixels; by default the model's own."""
    width: OptionalInt = None
    """Width in pixels; by default the model's own."""
    batch: int = 4
    """Videos made at once."""
    scale: OptionalInt = None
    """Each pixel drawn this many times in each direction; by default small clips are magnified."""
    dry_run: Flag = False
    """List the files that would be made and stop."""

    def run(self) -> None:
        from codmd import sampling

        sampling.run(
            self.model,
            prompts=self.prompt,
            prompts_file=self.prompts,
            out=self.out,
            steps=self.steps,
            seeds=self.seeds,
            seed0=self.seed0,
            guidance=self.guidance,
            frames=self.frames,
            height=self.height,
            width=self.width,
            batch=self.batch,
            scale=self.scale,
            dry_run=self.dry_run,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateMini:
    """Measure a model of the miniature by its oracle, beside its teacher."""

    model: Model
    """A run's folder, a checkpoint, or a folder with a pipeline."""
    against: str = "mini"
    """The teacher that it is compared with."""
    out: OptionalFolder = None
    """Folder for the table; by default beside the model."""
    prompts: int = 48
    """Evaluation prompts."""
    seeds: int = 2
    """Videos of each prompt."""

    def run(self) -> None:
        from codmd import evaluation

        evaluation.run_mini(self.model, against=self.against, out=self.out, prompts=self.prompts, seeds=self.seeds)


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run the paper's ablation and its sweep of λ in the miniature; run it again to go on."""

    out: Folder = Path("runs/reproduce")
    """Folder of the runs."""
    report: Path = Path("docs/results/mini.md")
    """The report that is written, with its figures and its numbers beside it."""
    only: Repeated = ()
    """Only this variant (dmd, codmd, batch, frame, direct, codmd-0.2, codmd-0.5, codmd-1.0); may be given
    many times."""
    seeds: OptionalInt = None
    """Seeds of each variant; by default 5 for dmd and codmd, 3 for the others."""
    overrides: Annotated[Repeated, arg(name="set", metavar="SECTION.KEY=VALUE")] = ()
    """Change one key of every run's recipe; may be given many times."""
    prompts: int = 48
    """Evaluation prompts."""
    clips: int = 2
    """Clips of each evaluation prompt."""
    checkpoints: int = 3
    """How many of a run's last checkpoints are scored and averaged over."""
    workers: int = 1
    """Runs at once; with more than one, each has one thread."""
    budget: Annotated[float | None, arg(metavar="MINUTES")] = None
    """Begin no further run after so many minutes."""
    report_only: Flag = False
    """Write the report of what is there and stop."""

    def run(self) -> None:
        from codmd import reproduce

        reproduce.run(
            out=self.out,
            report=self.report,
            only=self.only,
            seeds=self.seeds,
            overrides=self.overrides,
            prompts=self.prompts,
            clips=self.clips,
            checkpoints=self.checkpoints,
            workers=self.workers,
            budget=self.budget,
            report_only=self.report_only,
        )


@dataclass(frozen=True, kw_only=True)
class Selftest:
    """Check in minutes what needs this machine: bf16, ranks, compiled blocks, checkpoints, memory."""

    device: Annotated[str | None, arg(metavar="DEVICE")] = None
    """cpu or cuda; by default a GPU where there is one."""
    ranks: OptionalInt = None
    """Processes of the checks that need several; by default one for each GPU, or 2 on a CPU."""
    out: Folder = Path("runs/selftest")
    """Folder for the report and the logs."""

    def run(self) -> None:
        from codmd import selftest

        selftest.run(device=self.device, ranks=self.ranks, out=self.out)


@dataclass(frozen=True, kw_only=True)
class MiniPath:
    """Print where the miniature pipeline lies: a folder that stock diffusers loads."""

    def run(self) -> None:
        from codmd import mini

        print(mini.path())


@dataclass(frozen=True, kw_only=True)
class MiniTrainTeacher:
    """Make the miniature's weights again: data, VAE, text encoder, transformer; run it again to go on."""

    out: Folder = Path("runs/mini-teacher")
    """Folder for the pipeline and its checkpoints."""
    seed: int = 0
    """Seed of the whole training."""
    device: Annotated[str | None, arg(metavar="DEVICE")] = None
    """cpu or cuda; by default a GPU where there is one."""

    def run(self) -> None:
        from codmd.mini import train_teacher

        train_teacher.run(out=self.out, seed=self.seed, device=self.device)
