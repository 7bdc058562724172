"""The self-test passes on a machine that is well, and fails where one side of a comparison is broken."""

from __future__ import annotations

import getpass
import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from codmd import selftest
from codmd.cli import main
from codmd.engine import assembly, checkpoint
from codmd.engine.learner import Learner
from codmd.engine.loop import Trainer
from codmd.networks import WanNetwork
from codmd.networks.adapters import AdapterNetwork, base_state
from codmd.selftest import across, checks, command
from codmd.selftest.report import Line, table
from codmd.selftest.setting import Finding, Setting, Skipped, distance, gap

CPU = torch.device("cpu")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(CPU, 2, tmp_path, tmp_path)


@torch.no_grad()
def break_(network: WanNetwork) -> None:
    network.transformer.blocks[0].ffn.net[2].weight.neg_()


def passes(finding: Finding) -> bool:
    return finding.figure <= finding.bound


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """In a process of its own: what checks shapes in the tests would be in the compiler's way."""
    out = tmp_path_factory.mktemp("selftest") / "out"
    args = [sys.executable, "-m", "codmd", "selftest", "--device", "cpu", "--out", str(out)]
    return subprocess.run(args, capture_output=True, text=True, check=False, timeout=600), out


def test_it_passes_here_with_one_line_for_each_check(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    process, out = done
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [re.split(r" *\| *", line)[1:-1] for line in process.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == list(command.CHECKS)
    skipped = {"peak memory", "ranks: context, ring"}
    if checks._missing_for_compile(CPU):
        skipped.add("compiled blocks")
    assert {row[0]: row[1] for row in rows} == {n: "SKIPPED" if n in skipped else "PASS" for n in command.CHECKS}
    assert all(float(row[2]) <= float(row[3]) for row in rows if row[1] == "PASS")
    assert all("needs a GPU" in row[5] for row in rows if row[1] == "SKIPPED" and row[0] != "compiled blocks")
    assert process.stderr.count("\n") == len(command.CHECKS)  # progress, and nothing else
    assert (out / "report.md").read_text(encoding="utf-8") == process.stdout


def test_the_report_says_which_machine_and_not_whose(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    process, out = done
    for fact in (f"torch {torch.__version__}", "diffusers ", "peft ", "Python: ", "CPU: ", "attention: ", "2 ranks"):
        assert fact in process.stdout
    for private in (str(out), str(Path.home()), socket.gethostname(), f"{getpass.getuser()}/"):
        assert private not in process.stdout


def test_a_broken_check_and_a_crashing_one_stop_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(setting: Setting) -> Finding:
        raise RuntimeError("first line\nsecond line")

    recompute = assembly.recompute_blocks

    def broken(network: WanNetwork, *, selective: bool) -> None:
        recompute(network, selective=selective)
        break_(network)

    monkeypatch.setattr(assembly, "recompute_blocks", broken)
    chosen = {"blocks": checks.recomputed_blocks, "crash": crash, "memory": checks.peak_memory}
    chosen["nan"] = lambda setting: Finding(math.nan, 1)
    chosen["well"] = checks.offloaded_teacher
    monkeypatch.setattr(command, "CHECKS", chosen)
    with pytest.raises(SystemExit) as stop:
        main(["selftest", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert stop.value.code == 1
    out, err = capsys.readouterr()
    verdicts = dict(re.findall(r"^\| (\w+) +\| (PASS|FAIL|SKIPPED) ", out, re.M))
    assert verdicts == {"blocks": "FAIL", "crash": "FAIL", "memory": "SKIPPED", "nan": "FAIL", "well": "PASS"}
    assert "RuntimeError: first line |" in out and "second line" not in out
    assert "failed: blocks, crash, nan; details in" in err
    assert "Traceback" in (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            "--device cuda",
            "finds no GPU here; --device cpu checks what it can",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("--device tpu", '--device: expected cpu or cuda, got "tpu"'),
        ("--device cpu --ranks 0", "--ranks: expected at least 1, got 0"),
        (f"--device cpu --out {__file__}", "a file; --out needs a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_command_makes_one_call_that_its_function_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    call = create_autospec(selftest.run)
    monkeypatch.setattr(selftest, "run", call)
    assert main(["selftest", "--device", "cpu", "--ranks", "3", "--out", "there"]) == 0
    call.assert_called_once_with(device="cpu", ranks=3, out=Path("there"))


# ---- one side broken -----------------------------------------------------------------------------


class Broken(Setting):
    """Whatever is asked of the recipe breaks the student."""

    asked = ""

    def trainer(self, *overrides: str) -> Trainer:
        trainer = super().trainer(*overrides)
        if any(self.asked in override for override in overrides):
            break_(trainer.roles.student)
        return trainer


@pytest.mark.parametrize(
    ("check", "asked"),
    [
        (checks.bf16_velocity, "precision=bf16"),
        (checks.bf16_gradient, "precision=bf16"),
        (checks.bf16_rollout, "precision=bf16"),
        (checks.bf16_step, "precision=bf16"),
        (checks.recomputed_blocks, "checkpointing=blocks"),
        (checks.recomputed_all_but_attention, "checkpointing=selective"),
        (checks.offloaded_teacher, "offload_teacher=true"),
    ],
)
def test_a_weight_of_another_sign_on_one_side_fails(
    check: Callable[[Setting], Finding], asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "asked", asked)
    assert not passes(check(Broken(CPU, 2, tmp_path, tmp_path)))


def test_a_teacher_that_learns_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Learner.update

    def broken(self: Learner) -> None:
        update(self)
        assert isinstance(self.network, AdapterNetwork)
        base_state(self.network)["blocks.0.ffn.net.2.weight"].neg_()
        if self.updates == 2:
            base_state(self.network)["blocks.1.ffn.net.2.weight"].view(-1)[0] += 1

    monkeypatch.setattr(Learner, "update", torch.no_grad()(broken))
    finding = checks.adapters(setting)
    assert finding.figure == 2 and not passes(finding)  # the weight, and the answer


@pytest.mark.parametrize("check", [checks.checkpoint_at_once, checks.checkpoint_in_background])
@pytest.mark.parametrize("lost", ["student", "fake", "ema", "moments"])
def test_whatever_a_checkpoint_loses_fails(
    check: Callable[[Setting], Finding], lost: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = checkpoint.load

    @torch.no_grad()
    def broken(folder: Path, trainer: Trainer) -> None:
        load(folder, trainer)
        if lost == "ema":
            assert trainer.ema is not None
            next(iter(trainer.ema.average.values())).view(-1)[0] += 1
        elif lost == "moments":
            for moments in trainer.fake.optimizer.state.values():
                moments["exp_avg_sq"].zero_()
        else:
            next(iter(getattr(trainer.roles, lost).learned().values())).view(-1)[0] += 1

    monkeypatch.setattr(checkpoint, "load", broken)
    assert not passes(check(setting))


# ---- several ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss/batch", "loss/student", "gradient/fake"])
def test_a_rank_that_finds_something_else_fails(setting: Setting, name: str) -> None:
    alone = setting.steps()
    setting.answers = [{"sharded": {"found": alone}}, {"sharded": {"found": alone}}]
    assert passes(across.trained(setting, "sharded"))
    other = [{**record, name: record[name] * 1.01} for record in alone]
    setting.answers[1] = {"sharded": {"found": other}}
    assert not passes(across.trained(setting, "sharded"))


def test_sums_that_are_wrong_fail(setting: Setting) -> None:
    for error, right in ((0.0, True), (1.0, False), (math.nan, False)):
        setting.answers = [{"all_reduce": {"found": 0.0}}, {"all_reduce": {"found": error}}]
        assert passes(across.collective(setting, "all_reduce")) == right


def test_an_answer_that_is_missing_or_an_error_is_said(setting: Setting) -> None:
    for answers, says in (
        (None, "no answer; see their launch"),
        ([{"sharded": {"found": []}}, {}], "rank 1 gave no answer"),
        ([{"sharded": {"error": "ValueError: x"}}, {}], "rank 0: ValueError: x"),
    ):
        setting.answers = answers
        with pytest.raises(RuntimeError, match=says):
            across.trained(setting, "sharded")


def test_ranks_that_hang_are_killed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "LIMIT", 0.5)
    finding = across.launched(setting)
    assert finding.figure == 2 and not passes(finding) and "killed, its 0.5 s were over" in finding.note
    assert setting.answers == [{}, {}]


def test_a_rank_that_dies_is_reported_with_its_last_words(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "jobs", lambda setting: {"x": {"kind": "none", "given": "not a mapping"}})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    finding = across.launched(setting)
    assert finding.figure == 2 and "rank 0: exit code 1, without a word" in finding.note


def test_what_ranks_are_asked_is_what_the_report_says(setting: Setting) -> None:
    asked = across.jobs(setting)
    assert set(asked) == {*across.COLLECTIVES, *across.MESHES, across.SAVED} - {"ring"}
    assert across.OFFLOADED not in asked["large"]["given"]["overrides"]
    setting.device = torch.device("cuda")
    asked = across.jobs(setting)
    assert across.OFFLOADED in asked["large"]["given"]["overrides"] and "ring" in asked


def test_meshes_fill_the_ranks_and_what_needs_more_is_said(setting: Setting) -> None:
    for world, hybrid, ulysses in ((2, (2, 1), (2, 1)), (3, (3, 1), (3, 1)), (4, (2, 2), (2, 2)), (8, (2, 4), (2, 4))):
        setting.world = world
        assert across.hybrid_mesh(setting) == tuple(
            f"parallel.{name}={degree}" for name, degree in zip(("replicate", "shard"), hybrid, strict=True)
        )
        assert across.ulysses_mesh(setting) == tuple(
            f"parallel.{name}={degree}" for name, degree in zip(("context", "shard"), ulysses, strict=True)
        )
    setting.world = 1
    for mesh in (across.hybrid_mesh, across.ulysses_mesh):
        with pytest.raises(Skipped, match="needs 2 ranks"):
            mesh(setting)
    setting.world, setting.device = 1, torch.device("cuda")
    with pytest.raises(Skipped, match="needs 2 GPUs"):
        across.ring_mesh(setting)


# ---- measures and the report ---------------------------------------------------------------------


def test_gaps_are_relative_and_anything_missing_is_infinite() -> None:
    record = {"loss/student": 2.0, "loss/batch": 1e-6}
    assert gap([record], [record]) == 0
    assert gap([record | {"loss/student": 2.2}], [record]) == pytest.approx(0.1)
    assert gap([record | {"loss/batch": 3e-6}], [record]) == pytest.approx(1e-4)  # of 1% of the student's loss
    for wrong in ([], [{"loss/student": 2.0}], [record | {"loss/student": math.nan}]):
        assert gap(wrong, [record]) == math.inf


def test_distances_are_relative_and_what_is_not_finite_is_infinite() -> None:
    a = {"w": torch.tensor([3.0, 4.0])}
    assert distance({"w": torch.tensor([3.0, 4.5])}, a) == pytest.approx(0.1)
    for wrong in ({}, {"w": torch.tensor([3.0, math.nan])}):
        assert distance(wrong, a) == math.inf
    assert distance({}, {}) == math.inf


def test_a_row_stays_a_row() -> None:
    rows = table([Line("a", "FAIL", 1.0, "two\nlines | and a bar"), Line("b", "PASS", 2.0, "", 1e-5, 1e-4)])
    assert rows.splitlines()[2:] == [
        "| a     | FAIL   |        |        | 1.0 | two lines \\| and a bar |",
        "| b     | PASS   | 1e-05  | 0.0001 | 2.0 |  |",
    ]
