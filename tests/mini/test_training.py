"""The miniature's own training: it makes a stock folder from nothing, and goes on exactly after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file

from codmd.errors import UserError
from codmd.mini import train_teacher, train_transformer, train_vae
from codmd.mini.captions import held_out
from codmd.mini.train_teacher import TeacherConfig
from codmd.mini.train_transformer import Stage, caption, scene

TINY = Stage(clips=10, steps=4, batch=2, rate=1e-3, warmup=1, decay=0.9, reading=0.3, layout=0.1, frames=(3, 9))


@pytest.fixture
def tiny_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_vae, "ROUNDS", (((1, (1, 5, 32)),), ((1, (1, 9, 32)),)))
    monkeypatch.setattr(train_vae, "STATISTICS_CLIPS", 2)
    monkeypatch.setattr(train_vae, "DECODER_STEPS", 1)
    monkeypatch.setattr(train_vae, "DECODER_BATCH", (1, 17, 32))
    monkeypatch.setattr(train_teacher, "SHARD", 10)
    monkeypatch.setattr(train_transformer, "READING_STEPS", 2)


def test_from_nothing_to_a_folder_that_stock_diffusers_loads(tmp_path: Path, tiny_rounds: None) -> None:
    folder = train_teacher.run(tmp_path, config=TeacherConfig(stages=(TINY, TINY)))
    stock = WanPipeline.from_pretrained(folder)
    clip = stock("a red circle", num_frames=17, height=64, width=64, num_inference_steps=2, output_type="pt").frames
    assert clip.shape == (1, 17, 3, 64, 64)
    assert torch.isfinite(clip).all()
    assert not [path for path in folder.rglob("*.json") if str(tmp_path) in path.read_text()]


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = torch.randn(10, 16, 9, 8, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(train_transformer, "SAVE_EVERY", 1)
    monkeypatch.setattr(train_transformer, "READING_STEPS", 2)

    def train(out: Path) -> None:
        train_transformer.train_transformer(out, TINY, latents, number=1, first=0, seed=0, device=torch.device("cpu"))

    train(tmp_path / "whole")

    honest = train_transformer.progress

    def cut_after_two(title: str, start: int, steps: int):  # type: ignore[no-untyped-def]
        for step, bar in honest(title, start, steps):
            if step == 2:
                raise KeyboardInterrupt
            yield step, bar

    monkeypatch.setattr(train_transformer, "progress", cut_after_two)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut")
    monkeypatch.setattr(train_transformer, "progress", honest)
    train(tmp_path / "cut")

    name = "stage-1/trained/transformer/diffusion_pytorch_model.safetensors"
    whole, cut = load_file(tmp_path / "whole" / name), load_file(tmp_path / "cut" / name)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[k], cut[k]) for k in whole)


def test_a_training_that_is_cut_in_every_part_makes_the_same_folder(
    tmp_path: Path, tiny_rounds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TeacherConfig(stages=(TINY,))
    whole = train_teacher.run(tmp_path / "whole", config=config, device="cpu")
    for module in (train_vae, train_transformer):
        monkeypatch.setattr(module, "SAVE_EVERY", 1)
    cut: list[str] = []
    for module in (train_vae, train_teacher, train_transformer):
        honest = module.progress

        def once(title: str, start: int, steps: int, honest: Any = honest) -> Iterator[tuple[int, Any]]:
            for step, bar in honest(title, start, steps):
                yield step, bar
                if title not in cut and title != "reading":  # which is done within a step
                    cut.append(title)
                    raise KeyboardInterrupt

        monkeypatch.setattr(module, "progress", once)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            train_teacher.run(tmp_path / "cut", config=config, device="cpu")
    assert cut == ["autoencoder", "latents", "transformer, stage 1", "decoder"]
    pieced = train_teacher.run(tmp_path / "cut", config=config, device="cpu")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(pieced) for path in pieced.rglob("*") if path.is_file())
    assert all((whole / name).read_bytes() == (pieced / name).read_bytes() for name in files)

    with pytest.raises(UserError, match=r"other settings.*another --out"):
        train_teacher.run(tmp_path / "cut", config=TeacherConfig(stages=(TINY,), seed=1))


def test_a_wrong_folder_or_device_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        train_teacher.run(tmp_path / "file")
    with pytest.raises(UserError, match="not empty"):
        train_teacher.run(tmp_path)
    with pytest.raises(UserError, match="--device: gpu is not to be had"):
        train_teacher.run(tmp_path / "new", device="gpu")
    assert not (tmp_path / "new").exists()


def test_no_training_caption_is_an_evaluation_caption() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    texts = [caption(scene(0, i), rng) for i in range(300)]
    assert not any(held_out(t) for t in texts)


def test_schedule_covers_each_round_and_stops() -> None:
    total = sum(steps for stages in train_vae.ROUNDS for steps, _ in stages)
    factors = [train_vae.schedule(step)[0] for step in range(total)]
    assert all(0 < f <= 1 for f in factors)
    assert factors[-1] < 1e-3
    with pytest.raises(ValueError, match="beyond"):
        train_vae.schedule(total)
