"""A made-up result, to see the page with. None of its figures was measured."""

import numpy as np

from codmd.evaluation.mini_measures import MEASURES
from codmd.mini import captions, world
from codmd.report import Check, Column, Curve, DemoResult, Shot
from codmd.video import encode_mp4


def made_up_result(prompts: int = 8, seeds: int = 2, curves: bool = True) -> DemoResult:
    rng = np.random.default_rng(0)
    spec = (
        ("teacher", "Teacher", 100, 1.1, 0.94),
        ("dmd", "DMD", 4, 0.036, 0.86),
        ("codmd", "CoDMD", 4, 0.036, 0.89),
    )
    columns, shots = [], []
    for key, name, evaluations, seconds, level in spec:
        values = np.clip(level + 0.05 * rng.standard_normal(16), 0, 1).tolist()
        student = key != "teacher"
        columns.append(
            Column(
                key=key,
                name=name,
                role="4 steps" if student else "50 steps, guidance 3.5",
                evaluations=evaluations,
                seconds_per_clip=seconds,
                quality=level + 0.01,
                semantic=level - 0.02,
                total=level,
                measures=dict(zip(MEASURES, values, strict=True)),
                extras={"saturation error": 1.02 - level, "diversity ratio": level if student else None},
                updates=40 if student else None,
            )
        )
    for _ in range(prompts):
        asked = captions.describe(world.sample_scene(captions.sample_prior(rng), rng), rng)
        prompt = captions.write(asked)
        for seed in range(seeds):
            for column in columns:
                scene = world.sample_scene(asked.fixed(), rng)
                frames = ((world.render(scene) + 1) * 127.5).astype(np.uint8)
                checks = tuple(
                    Check(asked=word, met=bool(rng.random() < 0.85)) for word in prompt.replace(",", " ").split()[1:5]
                )
                mp4 = encode_mp4(frames, fps=8)
                shots.append(Shot(prompt=prompt, seed=seed, column=column.key, mp4=mp4, checks=checks))
    return DemoResult(
        columns=tuple(columns),
        shots=tuple(shots),
        curves=made_up_curves(rng) if curves else (),
        frames=17,
        fps=8,
        facts={"Evaluation": f"{prompts} prompts × {seeds} seeds", "Training seed": "0", "Time": "8:12"},
        commands=("codmd demo --seed 0", "codmd reproduce"),
        recipe='name = "mini"\n[train]\niterations = 200  # <not a tag>\n',
        differences="objective.method: dmd, codmd",
    )


def made_up_curves(rng: np.random.Generator) -> tuple[Curve, ...]:
    def learned(begin: float, end: float) -> tuple[tuple[int, float], ...]:
        noise = 0.01 * rng.standard_normal(6)
        return tuple((8 * i, float(end + (begin - end) * np.exp(-i / 1.5) + n)) for i, n in enumerate(noise))

    return tuple(
        Curve(
            title=title,
            lines={"dmd": learned(begin, end), "codmd": learned(begin, end + 0.04)},
            level=level,
            better=better,
        )
        for title, begin, end, level, better in (
            ("Dynamic degree", 0.5, 0.85, 0.93, "more is better"),
            ("Total", 0.6, 0.86, 0.94, "more is better"),
            ("Colour-saturation error", 0.3, 0.08, 0.02, "nearer to 0 is better"),
            ("Human action", 0.4, 0.8, 0.97, "more is better"),
        )
    )
