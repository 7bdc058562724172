"""Runs that are killed, stopped, starved and damaged: some cells of `bench.chaos`, and what they leave behind."""

import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_runs import TinyRuns, runs
from many_ranks import joined, launch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystem

from bench.chaos import ACCIDENTS, AFTER, BETWEEN, KILL, LOST_LAST, Cell, Outcome, Place, attempt, matrix
from bench.sitting import Failed, same
from codmd.cli import main
from codmd.engine import heartbeat, shelf, signals
from codmd.engine.distill import distill
from codmd.engine.heartbeat import GONE, LOST, Watch
from codmd.engine.meeting import agree
from codmd.engine.ranks import Ranks
from codmd.engine.tracking import JsonLines, read_json_lines
from codmd.errors import FAULT, NonFiniteError, UserError
from codmd.recipe import load_recipe, to_toml

ONE = Cell(accident=KILL, cut=AFTER)
TWO = Cell(accident=LOST_LAST, mode="adapter", ranks=2, cut=BETWEEN, asynchronous=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    prompts = runs.folder.parent / "prompts.txt"
    more = (f"model.base={runs.folder}", f"data.prompts={prompts}", "model.teacher_steps=2")
    size = ("video.frames=5", "video.height=32", "video.width=32")
    return Place(folder=tmp_path_factory.mktemp("accidents"), more=(*more, *size))


@pytest.fixture(scope="module")
def two_ranks(place: Place) -> Outcome:
    return attempt(place, TWO)


def test_a_killed_run_goes_on_bit_for_bit(place: Place) -> None:
    outcome = attempt(place, ONE)
    assert not outcome.failed, outcome.told


def test_a_rank_that_is_killed_is_named_and_both_go_on_bit_for_bit(two_ranks: Outcome) -> None:
    assert not two_ranks.failed, two_ranks.told


def test_the_matrix_holds_all_that_was_promised() -> None:
    cells, both = matrix(), {(mode, ranks) for mode in ("full", "adapter") for ranks in (1, 2)}
    assert len({cell.name for cell in cells}) == len(cells)
    killed = {(cell.mode, cell.ranks, cell.cut) for cell in cells if cell.accident == KILL and cell.then is None}
    assert killed == {(*kind, cut) for kind in both for cut in (AFTER, BETWEEN)}
    assert {(cell.mode, cell.ranks) for cell in cells if cell.then} == both
    assert {cell.accident for cell in cells} == set(ACCIDENTS)


# ---- what a run leaves behind --------------------------------------------------------------------


def opened(path: Path) -> None:
    """Reads a file as what it is called; any other kind of file is refused."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".jsonl":
        assert [json.loads(line) for line in path.read_text().splitlines()] == read_json_lines(path)
    else:
        assert path.suffix == ".toml", f"{path} is none of ours"
        load_recipe(path)


def test_nothing_that_a_run_wrote_is_pickled(two_ranks: Outcome) -> None:
    """Adapters, two ranks, asynchronous, killed once: whatever writes a file has written one."""
    files = [path for path in two_ranks.out.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jsonl", ".toml"}
    for path in files:
        opened(path)
    assert not [path for path in two_ranks.out.rglob(".*")]


@pytest.mark.parametrize("how", ["flipped bit", "truncated"])
def test_damage_to_any_file_of_two_ranks_is_named_and_the_checkpoint_before_is_used(
    two_ranks: Outcome, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_ranks.out, run, symlinks=True)
    before, newest = shelf.committed(run)
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert sum(path.parent.name == "state" for path in files) == 2  # one of each rank
    for path in files:
        content = bytearray((newest / path).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / path).write_bytes(content if how == "flipped bit" else content[:-1])
        assert shelf.newest_whole(run) == before
        said = capsys.readouterr().out
        assert path.name in said and f"damaged-{newest.name}" in said
        shutil.rmtree(newest.with_name(f"damaged-{newest.name}"))
        shutil.copytree(two_ranks.out / newest.relative_to(run), newest)


# ---- on one of two ranks -------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(step: int) -> Iterator[None]:
    """PyTorch's writer finds no room for the checkpoint after a step."""
    whole = FileSystem.create_stream

    @contextlib.contextmanager
    def create_stream(self: FileSystem, path: Path, mode: str) -> Iterator[io.IOBase]:
        with whole(self, path, mode) as stream:
            if f"step-{step:06d}" in str(path):
                stream.write(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            yield stream

    FileSystem.create_stream = create_stream
    try:
        yield
    finally:
        FileSystem.create_stream = whole


def accidents(rank: int, folder: str, teacher: Path) -> dict:
    """Everything goes wrong on rank 1; what both then do."""
    runs = TinyRuns(teacher)
    found = {}
    for name, asynchronous in (("full disk", False), ("full disk, asynchronous", True)):
        joined(rank, 2, name, folder)
        out = Path(folder) / name
        recipe = runs.recipe(
            "train.batch=4", "train.checkpoint_every=2", f"train.asynchronous={str(asynchronous).lower()}"
        )
        harm = full_disk(4) if rank == 1 else contextlib.nullcontext()
        with harm, contextlib.redirect_stderr(io.StringIO()) as said:
            result = distill(recipe, out)
        dist.destroy_process_group()
        found[name] = (result.exit_code, result.iterations, said.getvalue())
    for number in (signal.SIGTERM, signal.SIGINT):
        joined(rank, 2, number.name, folder)

        def interrupt(record: dict, number: int = number) -> None:
            if record["step"] == 2 and rank == 1:
                os.kill(os.getpid(), number)

        with contextlib.redirect_stderr(io.StringIO()) as said:
            result = distill(runs.recipe("train.batch=4"), Path(folder) / number.name, on_step=interrupt)
        dist.destroy_process_group()
        found[number.name] = (result.exit_code, result.iterations, said.getvalue())
    joined(rank, 2, "non-finite", folder)
    try:
        distill(runs.recipe("train.batch=4", "train.student_lr=1e30", "train.iterations=20"), Path(folder) / "nan")
    except NonFiniteError as error:
        found["non-finite"] = str(error)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, launch(2, accidents, str(folder), runs.folder)


@pytest.mark.parametrize("name", ["full disk", "full disk, asynchronous"])
def test_a_full_disk_on_one_rank_is_said_and_the_run_goes_on(on_two_ranks: tuple[Path, list[dict]], name: str) -> None:
    folder, found = on_two_ranks
    for of_rank in found:
        assert of_rank[name][:2] == (0, 6)
    said = [line for line in found[0][name][2].splitlines() if line.startswith("warning")]
    assert len(said) == 1 and "no checkpoint" in said[0] and "rank 1: the disk is full" in said[0]
    left = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000006"]
    assert all(shelf.damage(path) is None for path in shelf.committed(folder / name))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_both_at_a_checkpoint(
    on_two_ranks: tuple[Path, list[dict]], number: signal.Signals
) -> None:
    folder, found = on_two_ranks
    for of_rank in found:
        assert of_rank[number.name][:2] == (128 + number, 3)
    (newest,) = shelf.committed(folder / number.name)
    assert newest.name == "step-000003" and shelf.damage(newest) is None


def test_both_ranks_end_for_the_same_reason(on_two_ranks: tuple[Path, list[dict]]) -> None:
    one, other = (of_rank["non-finite"] for of_rank in on_two_ranks[1])
    assert one == other and "5 steps in a row" in one


# ---- signs of life -------------------------------------------------------------------------------


class Ended(Exception):
    """In place of the process's own end."""


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Watch, dict[str, int]]]:
    """Two ranks' watches in one process, over one store. The second is not running yet."""
    codes: dict[str, int] = {}

    def end(code: int) -> None:
        codes[threading.current_thread().name] = code
        raise SystemExit

    monkeypatch.setattr(heartbeat.os, "_exit", end)
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    both = tuple(Watch(Ranks(rank=rank, world=2), beat=0.05, patience=0.5) for rank in range(2))
    for watch in both:
        watch.thread.name = f"rank {watch.ranks.rank}"
    both[0].thread.start()
    yield *both, codes
    both[0].ended.set()


def test_a_silent_rank_is_named(watches: tuple, capfd: pytest.CaptureFixture[str]) -> None:
    one, _, codes = watches
    one.thread.join(5)
    assert codes == {"rank 0": LOST}
    assert capfd.readouterr().err.startswith("error: rank 1")


def test_what_broke_on_another_rank_is_told(watches: tuple, capfd: pytest.CaptureFixture[str]) -> None:
    one, other, codes = watches
    other.thread.start()
    other.leave("ValueError: no")
    one.thread.join(0.4)  # before its patience has run out
    assert codes == {"rank 0": LOST}
    said = capfd.readouterr().err
    assert said.startswith("error: rank 1") and "has ended: ValueError: no" in said


def test_ranks_that_end_together_do_not_end_one_another(watches: tuple) -> None:
    one, other, codes = watches
    other.thread.start()
    other.leave("UserError: the same on all")
    one.leave("UserError: the same on all")
    assert codes == {}


def test_one_that_could_hear_nobody_blames_nobody(watches: tuple) -> None:
    """Python held up for three times the patience, in all threads, as a large file's writer may do."""
    one, other, codes = watches
    other.thread.start()
    one.thread.join(0.2)
    ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL keeps the interpreter's lock
    one.thread.join(0.2)
    assert codes == {} and one.thread.is_alive() and other.thread.is_alive()
    other.leave("")


def test_a_good_end_is_no_loss(watches: tuple) -> None:
    one, other, codes = watches
    other.thread.start()
    other.leave("")
    one.thread.join(0.8)
    assert one.thread.is_alive() and codes == {} and GONE in one.store.get("beat 1").decode()


def test_ranks_that_come_back_agree_on_a_name_that_none_had_before() -> None:
    """The store is full of the last launch's answers, and the first rank comes last, or first."""
    store, names = dist.HashStore(), []

    def come(rank: int, found: dict[int, str]) -> None:
        found[rank] = agree(store, rank, 3, timedelta(seconds=20))

    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found: dict[int, str] = {}
        threads = [threading.Thread(target=come, args=(rank, found)) for rank in order]
        for thread in threads:
            thread.start()
            thread.join(0.2)
        for thread in threads:
            thread.join()
        assert len(set(found.values())) == 1 and found.keys() == {0, 1, 2}
        names.append(found[0])
    assert len(set(names)) == 3
    with pytest.raises(UserError, match="rank 1 has not come"):
        agree(store, 0, 2, timedelta(seconds=0.2))


# ---- a process of one's own ----------------------------------------------------------------------


def test_signals_that_arrive_together_count_as_one_and_a_later_one_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(record: dict) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    result = distill(runs.recipe(), tmp_path / "run", on_step=twice)
    assert (result.exit_code, result.iterations) == (130, 1)
    monkeypatch.setattr(signals, "ONCE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        distill(runs.recipe(), tmp_path / "run", on_step=twice)


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    def late(record: dict) -> None:
        if record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    result = distill(runs.recipe(), tmp_path / "run", on_step=late)
    assert (result.exit_code, result.iterations) == (0, 6)


def test_what_a_full_disk_does_not_take_of_the_log_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        """Takes half of a line, then nothing, while it is full."""

        def __init__(self, file: io.RawIOBase) -> None:
            self.file, self.writes = file, 0

        def write(self, data: bytes) -> int:
            self.writes += 1
            if self.writes == 2:
                return self.file.write(data[: len(data) // 2])
            if self.writes in (3, 4):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            self.file.close()

    open_lines = JsonLines.__init__

    def opened(self: JsonLines, path: Path, start: int = 0) -> None:
        open_lines(self, path, start)
        if path.name == "metrics.jsonl":
            self.file = Full(self.file)

    monkeypatch.setattr(JsonLines, "__init__", opened)
    distill(runs.recipe(), tmp_path / "run")
    said = capsys.readouterr().err
    assert "step 1: not written down yet" in said and "step 2: not written down yet" in said and "step 3" not in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_is_full_at_the_end_is_an_error_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asynchronous: str
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(to_toml(runs.recipe("train.checkpoint_every=4", f"train.asynchronous={asynchronous}")))
    with full_disk(6):
        assert main(["distill", str(recipe), "--out", str(out)]) == FAULT
    assert "error: the disk is full" in capsys.readouterr().err
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000004"]
    assert main(["distill", str(recipe), "--out", str(out)]) == 0
    assert "going on from" in capsys.readouterr().err
    assert (out / "latest").resolve().name == "step-000006"


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    distill(runs.recipe("train.iterations=1"), tmp_path / "run")
    for name in (".step-000009.writing", ".step-000000.deleted"):
        (tmp_path / "run" / "checkpoints" / name / "state").mkdir(parents=True)
    distill(runs.recipe("train.iterations=1"), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_cell_that_differs_fails(place: Place, two_ranks: Outcome, tmp_path: Path) -> None:
    """The comparison sees a single bit of a single tensor, and a single digit of a loss."""
    run = tmp_path / "run"
    shutil.copytree(two_ranks.out, run, symlinks=True)
    same(run, two_ranks.out)
    shard = next((shelf.committed(run)[-1] / "state").glob("shard-00002*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Failed, match=r"1 of \d+ tensors differ"):
        same(run, two_ranks.out)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])
    last["loss/fake"] *= 1 + 1e-15
    metrics.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(Failed, match="step 7: loss/fake"):
        same(run, two_ranks.out)


def test_every_damaged_checkpoint_is_no_new_start(two_ranks: Outcome, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_ranks.out, run, symlinks=True)
    for folder in shelf.committed(run):
        (folder / "state.json").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        shelf.newest_whole(run)
