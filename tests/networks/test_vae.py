"""The codec: a normalisation that is undone exactly, and the shapes of the stock pipeline."""

import tiny
import torch

from codmd.networks import LatentCodec

stock = tiny.pipeline()
codec = LatentCodec(stock.vae)


def clips(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_latents_are_the_vaes_own_less_mean_over_deviation() -> None:
    raw = stock.vae.encode(clips()).latent_dist.mode()
    mean, std = stock.vae.config.latents_mean[0], stock.vae.config.latents_std[0]
    torch.testing.assert_close(codec.encode(clips()), (raw - mean) / std)


def test_decoding_undoes_the_normalisation() -> None:
    raw = stock.vae.encode(clips()).latent_dist.mode()
    torch.testing.assert_close(codec.decode(codec.encode(clips())), stock.vae.decode(raw).sample, rtol=1e-4, atol=1e-5)


def test_decoding_is_that_of_the_stock_pipeline() -> None:
    """`WanPipeline` divides by 1/std and adds the mean."""
    latents = torch.randn(2, *codec.latent_shape(5, 16, 16), generator=torch.Generator().manual_seed(1))
    config = stock.vae.config
    mean, inverse = torch.tensor(config.latents_mean), 1 / torch.tensor(config.latents_std)
    shape = (1, -1, 1, 1, 1)
    expected = stock.vae.decode(latents / inverse.view(shape) + mean.view(shape)).sample
    torch.testing.assert_close(codec.decode(latents), expected, rtol=1e-4, atol=1e-5)


def test_the_batch_of_decoding_changes_nothing_and_values_stay_in_range() -> None:
    latents = 3 * torch.randn(3, *codec.latent_shape(5, 16, 16), generator=torch.Generator().manual_seed(2))
    one, all_at_once = codec.decode(latents, batch=1), codec.decode(latents, batch=3)
    torch.testing.assert_close(one, all_at_once, rtol=1e-4, atol=1e-5)
    assert one.shape == clips().shape and float(one.abs().max()) <= 1.0


def test_the_shape_that_is_promised_is_the_shape_that_comes() -> None:
    assert tuple(codec.encode(clips()).shape) == (3, *codec.latent_shape(5, 16, 16)) == (3, 4, 3, 2, 2)
    assert codec.latent_shape(1, 32, 16) == (4, 1, 4, 2)


def test_no_gradient_and_no_training_reach_the_vae() -> None:
    assert not stock.vae.training and not any(p.requires_grad for p in stock.vae.parameters())
    assert not codec.decode(codec.encode(clips(1)).requires_grad_()).requires_grad
