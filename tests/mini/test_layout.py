"""The places asked for are those where the renderer draws the objects."""

from __future__ import annotations

import numpy as np
import torch

from codmd.mini.layout import LATENT_FRAMES, NOT_ASKED, PATCHES, Layout, places
from codmd.mini.train_transformer import new_transformer, scene
from codmd.mini.world import COLOURS, SIZE, render
from codmd.networks import WanNetwork
from codmd.networks.text import TextCondition


def test_places_hold_the_middles_of_what_is_drawn() -> None:
    """Read from the pixels: the mean of those that look like the object's colour, in the middle frame of each pair."""
    rows = np.arange(SIZE) + 0.5
    seen = missed = 0
    for number in range(40):
        truth = scene(3, number, pairs=0.5)
        clip, asked = render(truth), places(truth, said=True)
        assert asked.shape == (LATENT_FRAMES, 2)
        assert (asked[:, len(truth.things) :] == NOT_ASKED).all()
        for which, thing in enumerate(truth.things):
            for frame in range(LATENT_FRAMES):
                picture = clip[2 * frame] / 2 + 0.5
                chroma = picture - picture.mean(-1, keepdims=True)
                colour = np.array(COLOURS[thing.colour]) - np.mean(COLOURS[thing.colour])
                along = (chroma @ colour) / (colour @ colour)
                aside = np.linalg.norm(chroma - along[..., None] * colour, axis=-1)
                alike = (along > 0.5) & (aside < 0.1)
                if not alike.any():
                    continue
                column, row = ((alike.sum(axis) @ rows) / alike.sum() * PATCHES / SIZE for axis in (0, 1))
                place = int(asked[frame, which])
                seen += 1
                # Between two patches a pixel decides, and the object has moved on by half a frame.
                missed += abs(column - (place % PATCHES + 0.5)) > 0.65 or abs(row - (place // PATCHES + 0.5)) > 0.65
    assert seen > 300 and missed == 0


def test_what_was_not_said_is_not_asked() -> None:
    assert (places(scene(3, 0), said=False) == NOT_ASKED).all()


def test_the_question_reaches_the_network_and_the_text() -> None:
    torch.manual_seed(0)
    network = WanNetwork(new_transformer())
    layout = Layout(network)
    tokens = torch.randn(2, 6, 96, requires_grad=True)
    text = TextCondition(tokens=tokens, lengths=torch.tensor([5, 3]))
    network.velocity(torch.randn(2, 16, 9, 8, 8), torch.full((2,), 0.9), text)
    right = torch.stack([places(scene(3, i, pairs=1.0), said=True) for i in range(2)])
    layout(right).backward()
    assert tokens.grad is not None and tokens.grad.abs().sum() > 0
    touched = [p.grad is not None for p in network.transformer.blocks[-2].parameters()]
    assert all(touched) and network.transformer.proj_out.weight.grad is None
