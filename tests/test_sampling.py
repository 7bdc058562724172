"""Sampling: the teacher is the stock pipeline's, noise is a clip's own, bad input is one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from codmd import sampling
from codmd.errors import UserError
from codmd.models import load_model
from codmd.sampling import Settings, generate_latents, noise_of, sample

PROMPTS = ["a red circle moves left", "a blue square"]
TIMES = [1.0, 0.75, 0.5]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_pipeline(tmp_path_factory.mktemp("teacher") / "pipeline")


@pytest.fixture(scope="module")
def student_folder(teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    tiny.transformer(seed=1).save_pretrained(folder / "student")
    facts = {"kind": "student", "base": str(teacher_folder), "steps": TIMES, "guidance": 1.0, "iteration": 7}
    (folder / "sampling.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ],
    ids=["euler", "unipc"],
)
@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_a_teacher_is_sampled_as_the_stock_pipeline_samples_it(
    tmp_path: Path, scheduler: object, guidance: float
) -> None:
    """The same latents from the same noise, though ours folds 512 tokens of text into a handful."""
    folder = tiny.save_pipeline(tmp_path / "pipeline", scheduler)
    model = load_model(folder, "cpu")  # where the stock pipeline is
    settings = Settings.of(model, steps=4, guidance=guidance)
    ours = generate_latents(model, PROMPTS, [0, 5], settings=settings)

    stock = tiny.pipeline().from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    noise = torch.stack([noise_of(p, s, ours.shape[1:]) for p, s in zip(PROMPTS, [0, 5], strict=True)])
    theirs = stock(
        prompt=PROMPTS, height=32, width=32, num_frames=5, num_inference_steps=4, guidance_scale=guidance,
        latents=noise, output_type="latent",
    ).frames  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - noise).abs().mean() > 0.1


def test_a_clip_does_not_depend_on_what_else_is_sampled(teacher_folder: Path, student_folder: Path) -> None:
    for folder in (teacher_folder, student_folder):
        model = load_model(folder)
        together = generate_latents(model, [*PROMPTS, PROMPTS[0]], [0, 0, 1], batch=3)
        alone = generate_latents(model, PROMPTS[:1], [1], batch=1)
        torch.testing.assert_close(together[2:], alone, rtol=1e-4, atol=1e-4)
        assert (together[0] - together[2]).abs().mean() > 0.01


def test_teacher_and_student_start_from_the_same_noise() -> None:
    shape = (4, 3, 2, 2)
    assert torch.equal(noise_of("a", 3, shape), noise_of("a", 3, shape))
    different = [
        noise_of("a", 3, shape),
        noise_of("b", 3, shape),
        noise_of("a", 4, shape),
        noise_of("a", 3, shape, 1),
    ]
    for i, one in enumerate(different):
        for other in different[i + 1 :]:
            assert not torch.allclose(one, other)


def test_a_student_is_evaluated_once_a_step(student_folder: Path) -> None:
    model, calls = load_model(student_folder), []
    generate_latents(model, PROMPTS, [0, 0], on_evaluation=calls.append)
    assert calls == [2] * len(TIMES)
    assert Settings.of(model).evaluations() == len(TIMES)
    assert model.about["iteration"] == 7


def test_a_teacher_is_evaluated_twice_a_step(teacher_folder: Path) -> None:
    model = load_model(teacher_folder)
    assert Settings.of(model).evaluations() == 2 * 3
    assert Settings.of(model, guidance=1.0, steps=50).evaluations() == 50


def test_videos_and_their_json_are_written_once(teacher_folder: Path, tmp_path: Path, capsys) -> None:
    arguments = {"prompts": PROMPTS, "out": tmp_path / "out", "steps": 2, "seeds": 2, "batch": 3}
    assert len(sampling.run(str(teacher_folder), **arguments, dry_run=True)) == 4
    assert not (tmp_path / "out").exists()

    paths = sampling.run(str(teacher_folder), **arguments)
    assert len(set(paths)) == 4 and all(path.read_bytes()[4:8] == b"ftyp" for path in paths)
    about = json.loads(paths[1].with_suffix(".json").read_text())
    assert (about["prompt"], about["seed"], about["steps"], about["guidance"]) == (PROMPTS[0], 1, 2, 3.5)
    assert len(about["times"]) == 2 and about["times"][0] == 1.0
    assert about["sampler"] == "FlowMatchEulerDiscreteScheduler" and about["network_evaluations"] == 4
    assert len(about["model_sha256"]) == 64 and "torch" in about["versions"] and about["fps"] == 8

    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[3].unlink()
    assert sampling.run(str(teacher_folder), **arguments) == paths
    assert paths[3].exists() and all(path.stat().st_mtime_ns == before[path] for path in paths[:3])
    assert "1 videos made, 3 were there" in capsys.readouterr().out

    arguments["steps"] = 1  # other settings are other files: nothing is overwritten
    assert not set(sampling.run(str(teacher_folder), **arguments)) & set(paths)


def test_the_python_call_gives_every_prompt_with_every_seed(student_folder: Path, tmp_path: Path) -> None:
    clips = sample(load_model(student_folder), PROMPTS, seeds=(3, 4), out=tmp_path)
    assert [(clip.prompt, clip.seed) for clip in clips] == [(p, s) for p in PROMPTS for s in (3, 4)]
    assert clips[0].frames.shape == (5, 32, 32, 3) and clips[0].frames.dtype == np.uint8
    assert clips[0].path is not None and clips[0].path.is_file()


@pytest.mark.parametrize(
    "prompt", ["x" * 10_000, "../../etc/passwd", "a\nb\0c", "🙂🎉", "con", ".", "C:\\x|y?*", "ä red círcle"]
)
def test_any_prompt_makes_a_safe_file(student_folder: Path, tmp_path: Path, prompt: str) -> None:
    (path,) = sampling.run(str(student_folder), prompts=[prompt], out=tmp_path / "out", seeds=1)
    assert path.parent == tmp_path / "out" and len(path.name) < 100
    assert set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert sorted(p.name for p in path.parent.iterdir()) == [path.with_suffix(".json").name, path.name]
    assert json.loads(path.with_suffix(".json").read_text())["prompt"] == prompt


def test_the_miniature_says_how_it_is_sampled() -> None:
    defaults = load_model("mini").defaults
    assert (defaults.steps, defaults.guidance, defaults.fps) == (50, 3.5, 8)
    assert (defaults.frames, defaults.height, defaults.width) == (17, 64, 64)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae", "scheduler", "tokenizer"])
def test_whatever_decides_how_a_clip_looks_is_in_the_models_hash(
    part: str, teacher_folder: Path, student_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(teacher_folder, tmp_path / "teacher")
    student = shutil.copytree(student_folder, tmp_path / "student")
    facts = json.loads((student / "sampling.json").read_text())
    (student / "sampling.json").write_text(json.dumps({**facts, "base": str(folder)}))
    before = load_model(folder).sha256, load_model(student).sha256
    assert before == (load_model(teacher_folder).sha256, load_model(student_folder).sha256)  # wherever it lies
    file = max((folder / part).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    if file.suffix == ".json":
        content += b"\n"
    else:
        content[-1] ^= 1
    file.write_bytes(content)
    after = load_model(folder).sha256, load_model(student).sha256
    assert after[0] != before[0]
    assert (after[1] != before[1]) == (part != "transformer")  # a student has a transformer of its own


# ---- what people get wrong -----------------------------------------------------------------------


def refused(call: object, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()  # type: ignore[operator]
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for word in words:
        assert word in message, message


def test_prompts_that_are_missing_or_empty(student_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n  \n")
    refused(lambda: sampling.run(str(student_folder)), "--prompt")
    refused(
        lambda: sampling.run(str(student_folder), prompts_file=tmp_path / "empty.txt"),
        "empty.txt",
        "no prompt",
    )
    refused(lambda: sampling.run(str(student_folder), prompts_file=tmp_path / "no.txt"), "no.txt", "no such file")
    refused(lambda: sampling.run(str(student_folder), prompts=[" "]), "empty prompt")


def test_settings_that_cannot_work(student_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    run = sampling.run
    refused(lambda: run(str(student_folder), prompts=["a"], steps=4), "3 steps", "got 4")
    refused(lambda: run(str(teacher_folder), prompts=["a"], steps=0), "steps")
    refused(lambda: run(str(teacher_folder), prompts=["a"], height=40), "height", "multiple of 16", "40")
    refused(lambda: run(str(teacher_folder), prompts=["a"], frames=6), "frames", "multiple of 2 plus 1")
    refused(lambda: run(str(teacher_folder), prompts=["a"], guidance=float("nan")), "guidance")
    refused(lambda: run(str(teacher_folder), prompts=["a"], seeds=0), "seeds")
    (tmp_path / "file").write_text("")
    refused(lambda: run(str(teacher_folder), prompts=["a"], out=tmp_path / "file"), "a file")


def test_models_that_are_not_there(teacher_folder: Path, student_folder: Path, tmp_path: Path) -> None:
    refused(lambda: load_model("minni"), "minni", "no such folder", 'did you mean "mini"')
    refused(lambda: load_model(teacher_folder.parent / "pipelin"), "did you mean", "pipeline")
    refused(lambda: load_model(tmp_path), "no model in this folder", "model_index.json")
    refused(lambda: load_model(teacher_folder / "model_index.json"), "a file", str(teacher_folder))
    refused(lambda: load_model(teacher_folder.parent), "did you mean", str(teacher_folder))
    refused(lambda: load_model(teacher_folder / "vae"), "did you mean", str(teacher_folder))


def test_models_that_are_damaged(teacher_folder: Path, student_folder: Path, tmp_path: Path) -> None:
    for name in ("transformer", "vae", "text_encoder"):
        broken = tmp_path / name
        shutil.copytree(teacher_folder, broken)
        file = next((broken / name).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
        refused(lambda broken=broken: load_model(broken), str(file), "truncated", "copy it again")
        file.write_bytes(b"not found")
        refused(lambda broken=broken: load_model(broken), str(file), "9 bytes")
        file.unlink()
        refused(lambda broken=broken: load_model(broken), str(file.parent), "safetensors")


def test_a_pipelines_facts_that_are_damaged(teacher_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(teacher_folder, tmp_path / "teacher")
    for content, word in (
        ('{"size": [5, 32', "JSON"),
        ('{"size": [5, 32]}', "size"),
        ('{"size": 5}', "size"),
        ('{"size": [5, 32, 32], "steps": "50"}', "steps: expected a whole number"),
    ):
        (folder / "codmd.json").write_text(content)
        refused(lambda: load_model(folder), "codmd.json", word)
    (folder / "codmd.json").write_text('{"fps": 8}')  # what it leaves out is Wan's own
    assert load_model(folder).defaults.frames == 81 and load_model(folder).defaults.fps == 8


def test_another_scale_is_another_file(student_folder: Path, tmp_path: Path) -> None:
    paths = [sampling.run(str(student_folder), prompts=["a"], seeds=1, out=tmp_path, scale=n)[0] for n in (1, 2)]
    assert paths[0] != paths[1]
    assert [json.loads(path.with_suffix(".json").read_text())["magnified"] for path in paths] == [1, 2]


def test_students_whose_facts_do_not_fit(student_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(student_folder, tmp_path / "student")
    file = tmp_path / "student" / "sampling.json"
    facts = json.loads(file.read_text())

    def with_facts(**change: object) -> object:
        file.write_text(json.dumps({**facts, **change}))
        return lambda: load_model(tmp_path / "student")

    refused(with_facts(base="/nowhere/base"), "sampling.json", "/nowhere/base", "base")
    refused(with_facts(steps=[0.5, 1.0]), "sampling.json", "falling times")
    refused(with_facts(steps=[]), "sampling.json")
    refused(with_facts(kind="other"), "sampling.json")
    refused(with_facts(frames="17"), "sampling.json", "frames: expected a whole number")
    file.write_text("{")
    refused(lambda: load_model(tmp_path / "student"), "sampling.json", "JSON")


def test_a_run_folder_means_its_chosen_or_latest_checkpoint(student_folder: Path, tmp_path: Path) -> None:
    for step in ("step-000010", "step-000020"):
        shutil.copytree(student_folder, tmp_path / "run" / "checkpoints" / step)
    assert load_model(tmp_path / "run").folder.name == "step-000020"
    (tmp_path / "run" / "chosen.json").write_text('{"checkpoint": "checkpoints/step-000010"}')
    assert load_model(tmp_path / "run").folder.name == "step-000010"
