"""Loading a folder: what stock diffusers loads is loaded; whatever is wrong with it is said in one line."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch
from diffusers import WanPipeline

from codmd.errors import UserError
from codmd.networks import load_pipeline
from codmd.networks.pipeline import NATIVE_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_pipeline(tmp_path_factory.mktemp("pipeline") / "teacher")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_pipeline(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_it_holds_what_the_stock_pipeline_holds(folder: Path) -> None:
    ours, stock = load_pipeline(folder), WanPipeline.from_pretrained(folder)
    for mine, theirs in (
        (ours.network.transformer, stock.transformer),
        (ours.text.model, stock.text_encoder),
        (ours.codec.vae, stock.vae),
    ):
        weights = theirs.state_dict()
        assert mine.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in mine.state_dict().items())
        assert not mine.training and not any(p.requires_grad for p in mine.parameters())
    assert type(ours.scheduler) is type(stock.scheduler) and ours.scheduler.config == stock.scheduler.config


def test_the_native_size_is_the_folders_or_wans(folder: Path, tmp_path: Path) -> None:
    assert load_pipeline(folder).size == (5, 32, 32)
    assert load_pipeline(folder).latent_shape == (4, 3, 4, 4)
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "codmd.json").unlink()
    assert load_pipeline(plain).size == NATIVE_SIZE
    assert load_pipeline(str(plain)).latent_shape == (4, 41, 60, 104)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")


def test_a_folder_that_is_no_pipeline(tmp_path: Path) -> None:
    assert "model_index.json" in refusal(tmp_path)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_a_truncated_file(folder: Path, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (file,) = (copy / part).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot be loaded" in refusal(copy)


def test_a_part_that_is_missing(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "vae")
    assert "cannot be loaded" in refusal(copy)


def test_an_index_that_is_no_json(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model_index.json").write_text("{")
    assert "cannot be loaded" in refusal(copy)
