"""Prompts to conditions, with the padding that Wan's cross-attention sees folded into one key.

`WanPipeline` pads each prompt's embeddings with zeros to 512 tokens, and attends to the padding. Those keys are all
alike, so n of them weigh as much as one with log n added to its logit: `TextCondition` keeps the real tokens and a
single zero slot, `FoldedPadding` adds the bias. The result is that of the stock call at a fraction of its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

PADDED_LENGTH = 512  # what WanPipeline pads to


@dataclass(frozen=True)
class TextCondition:
    """Embeddings of B prompts: `lengths[b]` real tokens, then zeros; every row has at least one zero slot."""

    tokens: Float[Tensor, "B K D"]
    lengths: Int[Tensor, " B"]

    def __post_init__(self) -> None:
        if self.lengths.device.type != "cpu":  # to look would be to wait for the device
            return
        longest = int(self.lengths.max())
        if self.tokens.shape[1] <= longest < PADDED_LENGTH:
            raise ValueError(f"tokens have {self.tokens.shape[1]} slots, expected more than {longest} (one is padding)")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def key_bias(self) -> Float[Tensor, "B 1 1 K"]:
        """Added to the logits of cross-attention: 0 for a token, log n for the slot of n pads, -inf beyond."""
        slot = torch.arange(self.tokens.shape[1], device=self.lengths.device)
        length = self.lengths[:, None]
        pads = (PADDED_LENGTH - length).clamp(min=1).log().to(torch.float32)
        bias = torch.where(slot < length, 0.0, torch.where(slot == length, pads, -math.inf))
        return bias[:, None, None, :]

    def select(self, index: Sequence[int] | Int[Tensor, " N"]) -> TextCondition:
        """The prompts at these positions, in this order, trimmed to the longest of them."""
        index = torch.as_tensor(index, device=self.lengths.device)
        lengths = self.lengths[index]
        slots = min(int(lengths.max()) + 1, self.tokens.shape[1])
        return TextCondition(self.tokens[index, :slots], lengths)

    def expand(self, batch: int) -> TextCondition:
        """One prompt repeated `batch` times."""
        return TextCondition(self.tokens.expand(batch, -1, -1), self.lengths.expand(batch))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TextCondition:
        return TextCondition(self.tokens.to(device=device, dtype=dtype), self.lengths.to(device=device))

    @staticmethod
    def cat(parts: Sequence[TextCondition]) -> TextCondition:
        """Stack prompts of any lengths."""
        slots = max(p.tokens.shape[1] for p in parts)
        pad = torch.nn.functional.pad
        tokens = torch.cat([pad(p.tokens, (0, 0, 0, slots - p.tokens.shape[1])) for p in parts])
        return TextCondition(tokens, torch.cat([p.lengths for p in parts]))


class FoldedPadding(WanAttnProcessor):
    """Wan's cross-attention with a bias on its keys. One instance serves all layers of a network.

    The bias is set before each forward. Whoever recomputes a forward later (activation checkpointing) must set it
    again for the recomputation.
    """

    bias: Tensor | None = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):  # type: ignore[no-untyped-def]
        if encoder_hidden_states is not None and self.bias is not None:
            attention_mask = self.bias.to(hidden_states.dtype)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


class TextEncoder:
    """The stock tokenizer and UMT5 encoder of a Wan folder."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: UMT5EncoderModel) -> None:
        self.tokenizer, self.model = tokenizer, model

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], batch: int = 64) -> TextCondition:
        """Clean, tokenize, encode and zero the padding, as `WanPipeline` does; longer than 512 tokens is cut."""
        parts = []
        for first in range(0, len(prompts), batch):
            ids, lengths = self.tokenize(prompts[first : first + batch])
            device = next(self.model.parameters()).device
            parts.append(self.embed(ids.to(device), lengths.to(device)))
        return TextCondition.cat(parts)

    def tokenize(self, prompts: Sequence[str]) -> tuple[Int[Tensor, "B K"], Int[Tensor, " B"]]:
        """Token ids padded to one slot beyond the longest prompt, and lengths."""
        rows = self.tokenizer(
            [prompt_clean(p) for p in prompts], truncation=True, max_length=PADDED_LENGTH, add_special_tokens=True
        )["input_ids"]
        lengths = torch.tensor([len(r) for r in rows])
        slots = min(int(lengths.max()) + 1, PADDED_LENGTH)
        ids = torch.full((len(rows), slots), self.tokenizer.pad_token_id or 0)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return ids, lengths

    def embed(self, ids: Int[Tensor, "B K"], lengths: Int[Tensor, " B"]) -> TextCondition:
        """Run the encoder (with gradient where enabled) and zero what is beyond each prompt's end."""
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        hidden = self.model(ids, attention_mask=mask.long()).last_hidden_state
        return TextCondition(hidden * mask[..., None], lengths)
