"""The page: whole in one file, safe whatever a prompt says, and true to what it was given."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import made_up_result

from codmd.report import DemoResult, write_page
from codmd.report.page import render

VOID = {"meta", "link", "input", "br", "hr", "img"}


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return made_up_result(prompts=7, seeds=2)


@pytest.fixture(scope="module")
def page(result: DemoResult) -> str:
    return render(result)


class Tree(HTMLParser):
    """Checks that tags nest, and collects ids, links and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Tree:
    tree = Tree()
    tree.feed(page)
    assert tree.open == []
    return tree


def test_the_page_asks_nothing_of_the_network(page: str) -> None:
    assert not re.search(r"https?:|//cdn|@import|url\(", page)
    for tag, attributes in parse(page).elements:
        assert not {"src", "srcset", "poster"} & set(attributes), tag
        assert attributes.get("href", "#").startswith("#") and tag != "link"
    assert "default-src 'none'" in page


def test_every_clip_is_in_it_and_has_a_name(result: DemoResult, page: str) -> None:
    tree = parse(page)
    videos = [attributes for tag, attributes in tree.elements if tag == "video"]
    assert len(videos) == len(result.shots) == 7 * 2 * 3
    embedded = json.loads(re.search(r'id="clips">(.*?)</script>', page, re.S).group(1))["videos"]
    assert {video["data-clip"] for video in videos} == set(embedded)
    assert {base64.b64decode(text) for text in embedded.values()} == {shot.mp4 for shot in result.shots}
    assert all(video["aria-label"] and "autoplay" not in video for video in videos)


def test_ids_are_unique_and_links_lead_somewhere(page: str) -> None:
    tree = parse(page)
    assert len(tree.ids) == len(set(tree.ids))
    for _, attributes in tree.elements:
        if attributes.get("href"):
            assert attributes["href"][1:] in tree.ids
        for name in ("aria-labelledby", "for"):
            assert attributes.get(name) is None or attributes[name] in tree.ids
    used = set(re.findall(r'\$\("([a-z]+)"\)', page))
    assert used and used <= set(tree.ids)


def test_controls_have_names(page: str) -> None:
    for tag, attributes in parse(page).elements:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label")
    for button in re.findall(r"<button.*?</button>", page, re.S):
        assert "aria-label=" in button or re.sub(r"<.*?>", "", button).strip()


def test_figures_stand_in_the_table(result: DemoResult, page: str) -> None:
    for column in result.columns:
        assert f"<td>{column.total:.3f}</td>" in page
        assert all(f"<td>{value:.3f}</td>" in page for value in column.measures.values())
    assert "<td>30.6×</td>" in page and "<td>100</td>" in page and "one training seed" in page


def test_text_is_escaped(result: DemoResult) -> None:
    prompt = '</script><script>alert("1")</script> & <b>"quotes"'
    shots = tuple(replace(shot, prompt=prompt) for shot in result.shots[:3])
    page = render(replace(result, shots=shots, commands=("<i>",), facts={"<u>": "<u>"}))
    parse(page)
    assert page.count("<script") == 2 and "alert(&quot;1" in page
    for raw in ("<b>", "<i>", "<u>"):
        assert raw not in re.sub(r"<b>Loop</b>", "", page)


def test_a_measure_that_applies_to_no_clip_is_a_dash(result: DemoResult) -> None:
    columns = tuple(replace(c, measures={**c.measures, "scene": None}) for c in result.columns)
    page = render(replace(result, columns=columns, curves=()))
    assert '<th scope="row">Scene</th><td>–</td><td>–</td><td>–</td>' in page
    assert "No learning curve" in page and ">nan<" not in page


def test_it_is_written_whole(result: DemoResult, tmp_path: Path) -> None:
    path = write_page(result, tmp_path / "new")
    assert path == tmp_path / "new" / "index.html" and path.read_text().startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]
