"""Training the miniature's transformer and text encoder together, by flow matching on latents and captions.

Captions are drawn anew for a clip each time it is used, and dropped one time in ten for guidance.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import UMT5EncoderModel

from codmd import flow
from codmd.data.streams import keyed_generator
from codmd.mini.captions import describe, held_out, sample_prior, write
from codmd.mini.gradients import Gradients
from codmd.mini.layout import LATENT_FRAMES, Layout, places
from codmd.mini.progress import SAY_EVERY, TrainingState, in_order, progress, whole_folder
from codmd.mini.reading import Reading, questions
from codmd.mini.train_vae import LATENT_CHANNELS
from codmd.mini.words import TEXT_WIDTH, new_text_encoder, new_tokenizer
from codmd.mini.world import Scene, sample_scene
from codmd.networks import TextEncoder, WanNetwork

DROPPED_CAPTIONS = 0.1
SCHEDULE_SHIFT = 3.0  # of the stock scheduler, and of the times of a training where it says nothing else
SAVE_EVERY = 1000  # steps
SLOTS = 32  # for the tokens of a caption: every batch has the same shape
PAIRS = 0.35  # share of clips with two objects
Losses = tuple[Tensor, Tensor]  # what is descended, and its parts to be shown
READING_STEPS, READING_BATCH, READING_RATE, SAME_WEIGHT = 1200, 64, 4e-3, 3.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One round of the training, on clips of its own; the next goes on with the averaged weights of this one."""

    clips: int
    pairs: float = PAIRS
    steps: int
    batch: int
    rate: float
    warmup: int
    decay: float  # of the running mean of the weights
    reading: float = 0.0  # weight of the questions to the text encoder, which above 0 first learns to answer them
    layout: float = 0.0  # weight of the questions to the transformer
    shift: float = SCHEDULE_SHIFT  # of the times: larger is noisier
    frames: tuple[int, ...] = (LATENT_FRAMES,)  # how much of each clip's beginning the steps look at, in turn

    def frames_at(self, step: int) -> int:
        return self.frames[step % len(self.frames)]


def scene(seed: int, index: int, pairs: float = PAIRS) -> Scene:
    """The training set's scene number `index`."""
    rng = np.random.default_rng((seed, index))
    return sample_scene(sample_prior(rng, pairs), rng)


def caption(truth: Scene, rng: np.random.Generator) -> str:
    """A caption of a scene that is not one of the evaluation's."""
    while held_out(text := write(describe(truth, rng))):
        continue
    return text


def new_transformer() -> WanTransformer3DModel:
    """Wan2.1's transformer with 5 layers of width 192: 144 tokens for a clip of 9 latent frames of 8 x 8."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=64, in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=512, num_layers=5,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


class Examples(Dataset[tuple[Tensor, ...]]):
    """What step n of a stage learns from: clips by number, token ids, lengths and questions of their captions,
    their objects' places, noise, times."""

    def __init__(self, seed: int, number: int, stage: Stage, first: int, latent_shape: tuple[int, ...]) -> None:
        self.seed, self.number, self.stage, self.first, self.latent_shape = seed, number, stage, first, latent_shape
        self.text = TextEncoder(new_tokenizer(), new_text_encoder())

    def __getitem__(self, step: int) -> tuple[Tensor, ...]:
        batch = self.stage.batch
        rng = np.random.default_rng((self.seed, step, self.number))
        index = rng.integers(0, self.stage.clips, batch)
        dropped = rng.random(batch) < DROPPED_CAPTIONS
        scenes = [scene(self.seed, self.first + int(i), self.stage.pairs) for i in index]
        texts = ["" if drop else caption(truth, rng) for truth, drop in zip(scenes, dropped, strict=True)]
        key = ("teacher", step) if self.number == 1 else ("teacher", self.number, step)
        generator = keyed_generator(self.seed, *key)
        frames = self.stage.frames_at(step)
        eps = torch.randn((batch, *self.latent_shape), generator=generator)[:, :, :frames]
        t = flow.shift(torch.sigmoid(torch.randn(batch, generator=generator)), self.stage.shift)
        ids, lengths = self.text.tokenize(texts)
        ids = nn.functional.pad(ids, (0, SLOTS - ids.shape[1]))
        asked = torch.stack([questions(text, SLOTS) for text in texts])
        where = torch.stack([places(truth, not drop) for truth, drop in zip(scenes, dropped, strict=True)])
        return torch.from_numpy(index), ids, lengths, asked, where[:, :frames], eps, t


def learn_to_read(text: TextEncoder, reading: Reading, stage: Stage, seed: int, device: torch.device) -> None:
    """The text encoder alone learns to answer, and to say otherwise what it said before: the transformer knows that."""
    before = TextEncoder(text.tokenizer, copy.deepcopy(text.model).requires_grad_(False))
    parameters = [*text.model.parameters(), *reading.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=READING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    for step, bar in progress("reading", 0, READING_STEPS):
        rng = np.random.default_rng((seed, step, 0))
        scenes = [sample_scene(sample_prior(rng, stage.pairs), rng) for _ in range(READING_BATCH)]
        texts = [caption(truth, rng) for truth in scenes]
        ids, lengths = (tensor.to(device) for tensor in text.tokenize(texts))
        tokens = text.embed(ids, lengths).tokens
        with torch.no_grad():
            was = before.embed(ids, lengths).tokens
        change = (tokens - was).square().mean(-1).sum() / lengths.sum()
        misread = reading(tokens, torch.stack([questions(words, ids.shape[1]) for words in texts]).to(device))
        optimizer.param_groups[0]["lr"] = READING_RATE * min((step + 1) / 100, 2.5 * (1 - step / READING_STEPS), 1.0)
        optimizer.zero_grad()
        (misread + SAME_WEIGHT * change).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % SAY_EVERY == 0:
            bar(f"misread {misread.item():.3f}, changed {change.item():.4f}")


class Optimizers:
    """Muon for the blocks' matrices, AdamW for the rest, behind one optimizer's face."""

    def __init__(self, network: WanNetwork, others: nn.Module, rate: float) -> None:
        matrices = [p for n, p in network.named_parameters() if ".blocks." in n and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for m in (network, others) for p in m.parameters() if id(p) not in chosen]
        self.muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.parameters = matrices + rest

    def set_rate(self, rate: float) -> None:
        for group in (*self.muon.param_groups, *self.adamw.param_groups):
            group["lr"] = rate

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


def train_transformer(
    out: Path, stage: Stage, latents: Tensor, *, number: int, first: int, seed: int, device: torch.device
) -> None:
    """Stage `number`, counted from 1, on the latents of the scenes from `first` on.

    Saves the averaged transformer and text encoder in `out/stage-NUMBER/trained`, and starts from those of the stage
    before.
    """
    torch.manual_seed(seed)
    transformer, text_model = new_transformer(), new_text_encoder()
    if number > 1:
        before = out / f"stage-{number - 1}" / "trained"
        transformer = WanTransformer3DModel.from_pretrained(before / "transformer")
        text_model = UMT5EncoderModel.from_pretrained(before / "text_encoder")
    network, text_model = WanNetwork(transformer).to(device).train(), text_model.to(device).train()
    text, reading = TextEncoder(new_tokenizer(), text_model), Reading(TEXT_WIDTH).to(device)
    learned = nn.ModuleDict({"network": network, "text": text_model})
    mean = copy.deepcopy(learned).requires_grad_(False)
    layout = Layout(network).to(device)
    others = nn.ModuleList([text_model, *([reading] if stage.reading else []), *([layout] if stage.layout else [])])
    optimizer = Optimizers(network, others, stage.rate)
    modules = {"learned": learned, "mean": mean, "reading": reading, "layout": layout}
    state = TrainingState(
        out / f"stage-{number}" / "training", modules, {"muon": optimizer.muon, "adamw": optimizer.adamw}
    )
    start, latents = state.resume(), latents.to(device)
    if stage.reading and start == 0:
        learn_to_read(text, reading, stage, seed, device)
        mean.load_state_dict(learned.state_dict())
    data = Examples(seed, number, stage, first, tuple(latents.shape[1:]))
    examples = in_order(data, start, stage.steps, device)

    def loss(x0: Tensor, ids: Tensor, lengths: Tensor, asked: Tensor, where: Tensor, eps: Tensor, t: Tensor) -> Losses:
        with torch.autocast(device.type, torch.bfloat16):
            condition = text.embed(ids, lengths)
            velocity = network.velocity(flow.add_noise(x0, eps, t), t, condition)
            misread = reading(condition.tokens, asked) if stage.reading else condition.tokens.new_zeros(())
            misplaced = layout(where) if stage.layout else condition.tokens.new_zeros(())
        error = (velocity.float() - flow.velocity(x0, eps)).square().mean()
        wanted = error + stage.reading * misread + stage.layout * misplaced
        return wanted, torch.stack([error, misread.float(), misplaced.float()])

    gradients = Gradients(loss, optimizer.parameters, device)
    shown = torch.zeros(3, device=device)
    for step, bar in progress(f"transformer, stage {number}", start, stage.steps):
        fade = min(1.0, (stage.steps - step) / (0.4 * stage.steps))  # constant, then linear to zero
        optimizer.set_rate(stage.rate * min((step + 1) / stage.warmup, fade))
        index, *example = next(examples)
        errors = gradients(latents[index, :, : stage.frames_at(step)].float(), *example)
        nn.utils.clip_grad_norm_(optimizer.parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            # While it is young the mean forgets faster, so that the start does not linger in it.
            share = max(1 - stage.decay, 1 / (step / 10 + 1))
            torch._foreach_lerp_(list(mean.parameters()), list(learned.parameters()), share)
            shown.lerp_(errors, max(0.01, 1 / (step - start + 1)))
        if (step + 1) % SAY_EVERY == 0 or step + 1 == stage.steps:
            bar("flow {:.4f}, reading {:.3f}, layout {:.3f}".format(*shown.tolist()))
        state.save_every(SAVE_EVERY, step + 1, stage.steps)

    learned.load_state_dict(mean.state_dict())
    with whole_folder(out / f"stage-{number}" / "trained") as folder:
        text_model.save_pretrained(folder / "text_encoder")
        network.transformer.save_pretrained(folder / "transformer")
