"""The shipped folder is a stock Wan pipeline: diffusers alone loads it and samples what our own loop samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from reading_shares import shares_read_right

from codmd import mini
from codmd.models import load_model
from codmd.sampling import Settings, generate_latents, noise_of


@pytest.fixture(scope="module")
def stock() -> WanPipeline:
    return WanPipeline.from_pretrained(mini.path())


def test_it_is_small_and_complete() -> None:
    folder = mini.path()
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 25e6
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["vae"] == ["diffusers", "AutoencoderKLWan"]
    assert index["text_encoder"] == ["transformers", "UMT5EncoderModel"]
    assert not [path for path in folder.rglob("*.json") if "_name_or_path" in path.read_text()]


def test_a_stock_call_returns_seventeen_frames(stock: WanPipeline) -> None:
    stock.set_progress_bar_config(disable=True)
    clip = stock("a red circle moves left", num_frames=17, height=64, width=64, num_inference_steps=2, output_type="pt")
    assert clip.frames.shape == (1, 17, 3, 64, 64)


def test_latents_are_normalised(stock: WanPipeline) -> None:
    from codmd.mini.train_transformer import scene
    from codmd.mini.world import render
    from codmd.networks import LatentCodec

    clips = torch.stack([torch.from_numpy(render(scene(123, i))) for i in range(6)]).permute(0, 4, 1, 2, 3)
    latents = LatentCodec(stock.vae).encode(clips)
    assert latents.shape == (6, 16, 9, 8, 8)
    assert abs(latents.std().item() - 1) < 0.25
    assert abs(latents.mean().item()) < 0.25


def test_the_words_of_every_caption_are_known(stock: WanPipeline) -> None:
    from codmd.mini.train_transformer import caption, scene

    rng = np.random.default_rng(0)
    texts = [caption(scene(5, i), rng) for i in range(200)]
    unknown = stock.tokenizer.unk_token_id
    assert all(unknown not in ids for ids in stock.tokenizer(texts).input_ids)


def test_our_sampling_is_the_stock_call(stock: WanPipeline) -> None:
    model = load_model("mini", "cpu")
    settings = Settings.of(model, steps=4)
    prompt = "a large blue square moves up, white background"
    stock.set_progress_bar_config(disable=True)
    theirs = stock(
        prompt, latents=noise_of(prompt, 3, settings.latent_shape(model))[None], num_frames=17, height=64, width=64,
        num_inference_steps=4, guidance_scale=settings.guidance, output_type="latent",
    ).frames  # fmt: skip
    ours = generate_latents(model, [prompt], [3], settings=settings)
    assert torch.allclose(ours, theirs, atol=2e-4)


def test_the_oracle_reads_what_the_autoencoder_gives_back(stock: WanPipeline) -> None:
    from codmd.mini.captions import sample_prior
    from codmd.mini.world import render, sample_scene
    from codmd.networks import LatentCodec

    rng = np.random.default_rng(21)
    scenes = [sample_scene(sample_prior(rng), rng) for _ in range(60)]
    codec = LatentCodec(stock.vae)
    clips = torch.stack([torch.from_numpy(render(scene)) for scene in scenes]).permute(0, 4, 1, 2, 3)
    again = codec.decode(codec.encode(clips), batch=10).permute(0, 2, 3, 4, 1).numpy()
    shares = shares_read_right(scenes, list(again))
    assert min(shares.values()) >= 0.97, shares
