"""Write `docs/benchmark.md`, with figures measured as it is written: `python -m codmd.evaluation.benchmark_page`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from codmd.evaluation.mini_benchmark import score
from codmd.evaluation.mini_measures import ABOUT, MEASURES, QUALITY
from codmd.evaluation.mini_prompts import evaluation_prompts
from codmd.mini.captions import read
from codmd.mini.corruptions import CORRUPTIONS
from codmd.mini.world import Scene, render, sample_scene

# The corruptions that spoil what a measure looks at, the first of them it alone where that can be.
SPOILED_BY = {
    "subject consistency": ("morph in mid-clip",),
    "background consistency": ("other background in mid-clip",),
    "temporal flickering": ("flicker",),
    "motion smoothness": ("jitter", "shuffle frames"),
    "dynamic degree": ("freeze",),
    "aesthetic quality": ("saturate",),
    "imaging quality": ("blur", "noise"),
    "object class": ("swap the shape",),
    "multiple objects": ("drop an object", "swap the shape"),
    "human action": ("change the motion", "reverse", "freeze"),
    "color": ("recolour",),
    "spatial relationship": ("swap the relation",),
    "scene": ("change the background",),
    "appearance style": ("change the style",),
    "temporal style": ("change the camera", "change the speed"),
    "overall consistency": ("recolour", "swap the shape", "change the motion"),
}

HEAD = """# The miniature's benchmark

Sixteen measures in [0, 1], named after VBench's dimensions and computed by the oracle (`codmd.mini.oracle`),
which reads a clip by analysis alone. The quality group looks at the clip, the semantic group holds what was read
against the caption. Quality is the mean of the first seven with dynamic degree at weight 0.5, semantic the mean
of the other nine, total = (4 · quality + semantic) / 5: VBench's weights, without its normalisation. A measure
that applies to none of the clips is NaN, left out of the means, and named.

The last columns were measured on {clips} clips that the renderer drew for the evaluation prompts: each measure on
these, and on the same clips after a corruption (`codmd.mini.corruptions`). Dynamic degree is, as in VBench, the
share of clips that move whatever their caption asks, so that it isn't 1 on the truth. Written by
`python -m codmd.evaluation.benchmark_page`.

| measure | group | formula | stands for | range | on the truth | corruption: value |
| --- | --- | --- | --- | --- | ---: | --- |
"""

# Figures beside the measures: what each is, and its right value.
BESIDE = {
    "dynamic where asked": ("share of the clips asked to move in which an object moves", "1"),
    "saturation error": ("chroma of the objects' colours / the true colours' − 1, signed", "0"),
    "diversity": (
        "open captions: mean share of the open attributes in which two clips of one caption differ",
        "the teacher's",
    ),
    "pixel diversity": (
        "the same, as the root mean square difference of 8×8 thumbnails of all frames",
        "the teacher's",
    ),
    "mode coverage": (
        "open captions: total variation between the student's and the teacher's attribute distributions, "
        "mean over attributes",
        "0; what equals get by chance stands beside it",
    ),
    "frame relation gap": (
        "mean absolute difference between the two models' frame similarity matrices, off the diagonal",
        "0",
    ),
    "batch relation gap": ("the same for the similarity matrix over all clips", "0"),
    "pairwise diversity difference": (
        "D(P) − D(Q) of Proposition 3, teacher less student, D the mean of 1 − cosine over pairs of clips",
        "0",
    ),
}

TAIL = """
Beside these, `codmd evaluate mini` reports:

| figure | formula | right is |
| --- | --- | --- |
{beside}

An open caption leaves at least half of shape, colour, background, style, motion (and, with two objects, relation)
to chance. Similarity matrices are those of the relational losses, from pooled latents. Blur makes saturation
errors negative: a small object's edges mix with what lies behind it.
"""


def truth(prompts: int, seeds: int = 2, seed: int = 0) -> tuple[list[str], list[Scene], list[np.ndarray]]:
    """Captions, scenes that fit them, and their clips."""
    rng = np.random.default_rng(seed)
    captions = [p for p in evaluation_prompts(prompts) for _ in range(seeds)]
    scenes = [sample_scene(read(c).fixed(), rng) for c in captions]
    return captions, scenes, [render(s) for s in scenes]


def spoiled(name: str, scenes: list[Scene], clips: list[np.ndarray], seed: int = 1) -> list[np.ndarray]:
    """The clips after a corruption."""
    rng = np.random.default_rng(seed)
    return [CORRUPTIONS[name](s, c, rng) for s, c in zip(scenes, clips, strict=True)]


def document(prompts: int = 48) -> str:
    """The page, measured now."""
    captions, scenes, clips = truth(prompts)
    base = score(clips, captions).measures()
    names = dict.fromkeys(n for names in SPOILED_BY.values() for n in names)
    after = {n: score(spoiled(n, scenes, clips), captions).measures() for n in names}
    page = HEAD.format(clips=len(clips))
    for measure in MEASURES:
        formula, stands_for = ABOUT[measure]
        group = "quality" if measure in QUALITY else "semantic"
        falls = ", ".join(f"{n}: {after[n][measure]:.2f}" for n in SPOILED_BY[measure])
        page += f"| {measure} | {group} | {formula} | {stands_for} | 0 to 1 | {base[measure]:.2f} | {falls} |\n"
    beside = "\n".join(f"| {name} | {formula} | {right} |" for name, (formula, right) in BESIDE.items())
    return page + TAIL.format(beside=beside)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/benchmark.md").write_text(document())
