"""A Wan folder in the diffusers layout, loaded from disk with stock classes into the parts that we use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import transformers
from diffusers import WanPipeline

from codmd.errors import UserError
from codmd.files import read_json_object
from codmd.networks.text import TextEncoder
from codmd.networks.vae import LatentCodec
from codmd.networks.wan import WanNetwork

LARGE = 1e9  # bytes of a folder from which on loading is worth a progress bar
FACTS = "codmd.json"  # beside `model_index.json`: how the model is sampled, where it isn't as Wan2.1 is
NATIVE_SIZE = (81, 480, 832)  # frames, height, width of Wan2.1 at 480p


@dataclass(frozen=True)
class Pipeline:
    """The teacher and what surrounds it. `size` is frames, height, width of the clips it was trained on; `facts` is
    what `codmd.json` says."""

    folder: Path
    network: WanNetwork
    text: TextEncoder
    codec: LatentCodec
    scheduler: Any
    size: tuple[int, int, int]
    facts: Mapping[str, Any]

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """[C, F, H, W] of one clip's latents at the native size."""
        return self.codec.latent_shape(*self.size)


LoadNetwork = Callable[[Path], WanNetwork]
"""Makes a network from the folder of a transformer."""


def load_pipeline(folder: str | Path, network: LoadNetwork | None = None) -> Pipeline:
    """Load a pipeline folder; whatever is wrong with it is said in one line.

    `codmd.json` beside `model_index.json` may state the native size (the miniature has one); a folder without it
    is taken for Wan2.1 at 480p.
    """
    folder = Path(folder)
    facts = read_json_object(folder / FACTS) if (folder / FACTS).is_file() else {}
    size = facts.get("size", NATIVE_SIZE)
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(isinstance(n, int) and n > 0 for n in size):
        raise UserError(f"{folder / FACTS}: size: expected frames, height and width, got {size}; copy the model again")
    if not (folder / "model_index.json").is_file():
        what = "no such folder" if not folder.exists() else "it has no model_index.json"
        raise UserError(f"{folder} is not a diffusers pipeline folder ({what}); give a Wan2.1 folder or 'mini'")
    try:
        with quiet_loading(folder):
            without = {"transformer": None} if network is not None else {}
            stock = WanPipeline.from_pretrained(folder, local_files_only=True, **without)
    except Exception as error:  # diffusers, transformers and safetensors each raise their own
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} cannot be loaded as a WanPipeline: {reason}") from error
    if network is None:
        stock.transformer.eval().requires_grad_(False)
    stock.text_encoder.eval().requires_grad_(False)
    return Pipeline(
        folder=folder,
        network=WanNetwork(stock.transformer) if network is None else network(folder / "transformer"),
        text=TextEncoder(stock.tokenizer, stock.text_encoder),
        codec=LatentCodec(stock.vae),
        scheduler=stock.scheduler,
        size=tuple(size),
        facts=facts,
    )


@contextmanager
def quiet_loading(folder: Path) -> Iterator[None]:
    """Without the libraries' own progress bars where there is nothing to wait for."""
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > LARGE:
        yield
        return
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in (diffusers.utils.logging, transformers.utils.logging):
            library.enable_progress_bar()
