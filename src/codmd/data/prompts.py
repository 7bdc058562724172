"""Where prompts come from: the miniature's own captions, or a text file with one prompt on each line.

What is kept for validation is never trained on. The miniature's captions fall into three sets that share no
caption: those for evaluation (`captions.held_out`), those for validation, and those for training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from codmd.data.streams import keyed_generator
from codmd.errors import UserError
from codmd.networks.text import TextCondition

MOST_MINI_PROMPTS = 4096


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run."""

    training: tuple[str, ...]
    validation: tuple[str, ...]


def load_prompts(source: str, *, count: int | None, needed: int, held_out_seed: int, validation: int) -> PromptSet:
    """The prompts that `source`, "mini" or a file, gives a run that needs `needed` training samples.

    `validation` prompts are drawn by `held_out_seed` and kept apart. `count` limits the training prompts;
    None means all of a file's, and for the miniature as many as the run needs, up to 4,096.
    """
    if source == "mini":
        total = count or min(needed, MOST_MINI_PROMPTS)
        return PromptSet(
            training=tuple(mini_prompt(0, i, _for_training) for i in range(total)),
            validation=tuple(mini_prompt(held_out_seed, i, _for_validation) for i in range(validation)),
        )
    prompts = read_prompts(Path(source))
    unique = list(dict.fromkeys(prompts))
    if validation >= len(unique):
        raise UserError(
            f"{source}: {len(unique)} different prompts, of which validation would keep {validation}: "
            "give more prompts, or set validation.prompts lower, or validation.every = 0"
        )
    order = np.random.default_rng(held_out_seed).permutation(len(unique))
    held = {unique[i] for i in order[:validation]}
    training = [p for p in prompts if p not in held]
    return PromptSet(training=tuple(training[:count]), validation=tuple(p for p in unique if p in held))


def read_prompts(path: Path) -> list[str]:
    """One prompt on each line; blank lines are dropped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file of prompts") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: expected UTF-8, got other bytes; save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: the prompts cannot be read: {reason}") from None
    # Only line ends end a prompt: str.splitlines would also cut at form feeds and the like.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path}: no prompt in it; write one prompt on each line")
    return prompts


def mini_prompt(seed: int, index: int, wanted: Callable[[str], bool]) -> str:
    """Caption number `index` of the miniature's world that is `wanted`: a scene, and what is said of it."""
    from codmd.mini import captions
    from codmd.mini.world import sample_scene

    rng = np.random.default_rng(keyed_generator(seed, "mini prompt", index).initial_seed())
    while True:
        caption = captions.write(captions.describe(sample_scene(captions.sample_prior(rng), rng), rng))
        if wanted(caption):
            return caption


def _for_training(caption: str) -> bool:
    from codmd.mini import captions

    return not captions.held_out(caption) and not _reserved(caption)


def _for_validation(caption: str) -> bool:
    from codmd.mini import captions

    return not captions.held_out(caption) and _reserved(caption)


def _reserved(caption: str) -> bool:
    """True for one caption in 32, by a hash of its own."""
    return hashlib.blake2b(caption.encode(), digest_size=1, person=b"validation").digest()[0] < 8


@runtime_checkable
class Encoder(Protocol):
    """What `networks.TextEncoder` does."""

    def encode(self, prompts: Sequence[str], batch: int = 64) -> TextCondition: ...


class EncodedPrompts:
    """Prompts and their embeddings, kept in memory. Each different prompt is encoded once, at the start."""

    def __init__(
        self,
        encoder: Encoder,
        prompts: Sequence[str],
        batch: int = 64,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.prompts = tuple(prompts)
        unique = list(dict.fromkeys(prompts))
        parts = []
        for first in range(0, len(unique), batch):
            parts.append(encoder.encode(unique[first : first + batch], batch=batch))
            progress(min(first + batch, len(unique)), len(unique))
        self._text = TextCondition.cat(parts).to("cpu")  # all of them: a device needs a batch's at a time
        row = {prompt: i for i, prompt in enumerate(unique)}
        self._row = [row[prompt] for prompt in prompts]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def keys(self) -> int:
        """What cross-attention sees of a prompt, on average: its tokens, and one slot of padding."""
        return round(float(self._text.lengths.float().mean())) + 1

    def select(self, indices: Sequence[int]) -> TextCondition:
        """The embeddings of the prompts at these places."""
        return self._text.select([self._row[i] for i in indices])
