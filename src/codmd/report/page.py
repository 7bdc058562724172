"""Fills the page's template: text is escaped here, and videos and charts are put in their places."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from codmd.files import write_whole
from codmd.report import charts, tables, words
from codmd.report.result import Column, Curve, DemoResult, Shot, unique

PER_PAGE = 6
SPEEDS = (("0.25", "¼×"), ("0.5", "½×"), ("1", "1×"))


def write_page(result: DemoResult, out: Path) -> Path:
    """Writes `out` (or `out/index.html` where `out` is a folder): one file with everything in it."""
    path = out if out.suffix == ".html" else out / "index.html"
    write_whole(path, render(result).encode())
    return path


def render(result: DemoResult) -> str:
    """The page as text."""
    asset = resources.files("codmd.report")
    seeds = unique([str(shot.seed) for shot in result.shots])
    return Template((asset / "page.html").read_text(encoding="utf-8")).substitute(
        css=(asset / "page.css").read_text(encoding="utf-8").strip(),
        js=(asset / "page.js").read_text(encoding="utf-8").strip(),
        headline=words.headline(result),
        lead=words.lead(result),
        tiles=words.tiles(result),
        warning=words.warning(result),
        videos_text=words.videos_text(result),
        frames=str(result.frames),
        last_frame=str(result.frames - 1),
        speeds="".join(_radio("speed", value, label, value == "1") for value, label in SPEEDS),
        seeds=_seed_choice(seeds),
        prompts=_prompts(result),
        radar_text=words.radar_text(result),
        radar=_radar(result),
        legend=_legend(result.columns),
        measures_table=tables.measures(result),
        curves_text=words.curves_text(result),
        curves="".join(_curve(curve, result) for curve in result.curves),
        numbers_table=tables.numbers(result),
        numbers_note=words.NUMBERS_NOTE,
        honest=words.honest(result),
        facts=words.facts(result),
        commands=escape("\n".join(result.commands)),
        recipe=escape(result.recipe + (f"\n# {result.differences}" if result.differences else "")),
        clips=_clips(result),
    )


# ---- videos --------------------------------------------------------------------------------------


def _prompts(result: DemoResult) -> str:
    articles = []
    for i, prompt in enumerate(unique([shot.prompt for shot in result.shots])):
        rows: list[str] = []
        for seed in unique([shot.seed for shot in result.shots if shot.prompt == prompt]):
            cells = "".join(
                _cell(shot, index, column)
                for index, column in enumerate(result.columns)
                for shot in result.shots
                if (shot.prompt, shot.seed, shot.column) == (prompt, seed, column.key)
            )
            hidden = " hidden" if rows else ""
            style = f"--columns:{len(result.columns)}"
            rows.append(f'<div class="row" data-seed="{seed}" style="{style}"{hidden}>{cells}</div>')
        hidden = " hidden" if i >= PER_PAGE else ""
        articles.append(f'<article class="prompt"{hidden}><h3>{escape(prompt)}</h3>{"".join(rows)}</article>')
    return "".join(articles)


def _cell(shot: Shot, index: int, column: Column) -> str:
    name = escape(column.name)
    label = escape(f"{column.name}: {shot.prompt} (seed {shot.seed})", quote=True)
    checks = "".join(
        f'<li class="{"met" if check.met else "missed"}">'
        f'<span class="hide">{"shown: " if check.met else "not shown: "}</span>{escape(check.asked)}</li>'
        for check in shot.checks
    )
    listed = f'<ul class="checks">{checks}</ul>' if checks else ""
    return (
        f'<figure><figcaption class="name">{charts.swatch(index)}{name}</figcaption>'
        f'<video muted playsinline preload="auto" data-clip="{clip_key(shot)}" aria-label="{label}"></video>'
        f"{listed}</figure>"
    )


def _clips(result: DemoResult) -> str:
    data = {
        "frames": result.frames,
        "fps": result.fps,
        "perPage": PER_PAGE,
        "videos": {clip_key(shot): base64.b64encode(shot.mp4).decode() for shot in result.shots},
    }
    return json.dumps(data).replace("<", "\\u003c")


def clip_key(shot: Shot) -> str:
    """A name for a clip that is safe in an attribute."""
    digest = hashlib.blake2b(shot.prompt.encode(), digest_size=6).hexdigest()
    return f"{digest}-{shot.seed}-{escape(shot.column, quote=True)}"


def _seed_choice(seeds: Sequence[str]) -> str:
    if len(seeds) < 2:
        return ""
    options = "".join(_radio("seed", seed, seed, i == 0) for i, seed in enumerate(seeds))
    return f"<fieldset><legend>Seed</legend>{options}</fieldset>"


def _radio(name: str, value: str, label: str, checked: bool) -> str:
    box = f'<input type="radio" name="{name}" value="{value}"{" checked" if checked else ""}>'
    return f'<label class="choice">{box}<span><span class="hide">{name} </span>{label}</span></label>'


# ---- charts --------------------------------------------------------------------------------------


def _legend(columns: Sequence[Column]) -> str:
    items = "".join(f"<span>{charts.swatch(i)}{escape(column.name)}</span>" for i, column in enumerate(columns))
    return f'<span class="legend">{items}</span>'


def _radar(result: DemoResult) -> str:
    applies = [m for m in result.teacher.measures if all(c.measures[m] is not None for c in result.columns)]
    series = {c.name: [v for m in applies if (v := c.measures[m]) is not None] for c in result.columns}
    return charts.radar(applies, series, "The measures of each model")


def _curve(curve: Curve, result: DemoResult) -> str:
    index = {column.key: i for i, column in enumerate(result.columns)}
    series = {index[key]: list(points) for key, points in curve.lines.items()}
    chart = charts.lines(
        series,
        f"{curve.title} against student updates",
        titles=[column.name for column in result.columns],
        level=curve.level,
        x_label="student updates",
    )
    return f'<figure class="card"><h3>{escape(curve.title)}</h3><p>{escape(curve.better)}</p>{chart}</figure>'
