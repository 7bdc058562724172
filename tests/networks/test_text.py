"""Prompts and their padding: what is folded is what the stock pipeline computes."""

import tiny
import torch
from diffusers import WanPipeline
from torch import Tensor

from codmd.networks import TextCondition, TextEncoder, WanNetwork
from codmd.networks.text import PADDED_LENGTH

PROMPTS = ["a red circle moves left", "", "the  green &amp; square  spins"]


def encoded() -> tuple[WanPipeline, TextCondition]:
    stock = tiny.pipeline()
    stock.text_encoder.eval()
    return stock, TextEncoder(stock.tokenizer, stock.text_encoder).encode(PROMPTS)


def padded(text: TextCondition) -> Tensor:
    """The embeddings as the stock pipeline has them: zeros up to 512."""
    return torch.nn.functional.pad(text.tokens, (0, 0, 0, PADDED_LENGTH - text.tokens.shape[1]))


def test_encoding_is_that_of_the_stock_pipeline() -> None:
    stock, text = encoded()
    embeds, _ = stock.encode_prompt(
        PROMPTS, do_classifier_free_guidance=False, max_sequence_length=PADDED_LENGTH, device=torch.device("cpu")
    )
    torch.testing.assert_close(padded(text), embeds, rtol=0, atol=1e-5)
    assert text.lengths.tolist() == [6, 1, 6]


def test_what_is_longer_than_512_tokens_is_cut_as_there() -> None:
    stock, _ = encoded()
    long = ["a " * 600]
    text = TextEncoder(stock.tokenizer, stock.text_encoder).encode(long)
    embeds, _ = stock.encode_prompt(
        long, do_classifier_free_guidance=False, max_sequence_length=PADDED_LENGTH, device=torch.device("cpu")
    )
    assert text.tokens.shape[1] == PADDED_LENGTH == int(text.lengths)
    torch.testing.assert_close(text.tokens, embeds, rtol=0, atol=1e-4)
    assert not text.key_bias().any()  # nothing is padding, so nothing is folded


def test_folded_padding_is_the_stock_call_in_value_and_gradient() -> None:
    _, text = encoded()
    ours, stock = WanNetwork(tiny.transformer()), tiny.transformer()
    x = torch.randn(3, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.9, 0.3, 0.02])
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    tokens, slots = text.tokens.clone().requires_grad_(), padded(text).requires_grad_()
    folded = ours.velocity(mine, t, TextCondition(tokens, text.lengths))
    full = stock(theirs, timestep=1000 * t, encoder_hidden_states=slots, return_dict=False)[0]
    torch.testing.assert_close(folded, full, rtol=1e-4, atol=1e-5)

    (folded * direction).sum().backward()
    (full * direction).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(ours.transformer.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=5e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert tokens.grad is not None and slots.grad is not None
    for row, length in enumerate(text.lengths.tolist()):
        torch.testing.assert_close(tokens.grad[row, :length], slots.grad[row, :length], rtol=1e-4, atol=1e-5)


def test_the_padding_matters_to_the_stock_call() -> None:
    """Otherwise the test above would hold without any folding."""
    _, text = encoded()
    ours = WanNetwork(tiny.transformer())
    x, t = torch.randn(3, 4, 3, 4, 4), torch.full((3,), 0.5)
    whole = ours.velocity(x, t, text)
    ours._padding.bias = None
    bare = ours.transformer(x, timestep=1000 * t, encoder_hidden_states=text.tokens, return_dict=False)[0]
    assert (whole - bare).abs().max() > 1e-4


def test_company_does_not_matter() -> None:
    """A prompt's result is the same alone, in any order, and beside longer prompts."""
    _, text = encoded()
    ours = WanNetwork(tiny.transformer())
    x, t = torch.randn(3, 4, 3, 4, 4), torch.tensor([0.9, 0.5, 0.1])
    together = ours.velocity(x, t, text)
    alone = [ours.velocity(x[i : i + 1], t[i : i + 1], text.select([i])) for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-5)
    assert text.select([1]).tokens.shape[1] == 2  # trimmed to its own length and one slot of padding
    joined = TextCondition.cat([text.select([1]), text.select([0, 2])])
    torch.testing.assert_close(
        ours.velocity(x[[1, 0, 2]], t[[1, 0, 2]], joined), together[[1, 0, 2]], rtol=1e-4, atol=1e-5
    )
