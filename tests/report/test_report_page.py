"""The HTML page: self-contained, escaped, whole or not there."""

from __future__ import annotations

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from preftune.errors import ConfigError
from preftune.report import History, RunReport, Sample, write_report
from preftune.report.page import GLOSSARY, show

HISTORY = History(({"step": 1, "loss": 0.7}, {"step": 2, "loss": 0.6}))


def run(**changes) -> RunReport:
    given = {"name": "first", "history": HISTORY, "facts": {}, "figures": {}, "samples": (), "notes": ()}
    return RunReport(**{**given, **changes})


@pytest.fixture
def page(tmp_path):
    def page(*runs: RunReport, title: str = "A title") -> str:
        path = tmp_path / "report.html"
        write_report(runs, path, title)
        return path.read_text(encoding="utf-8")

    return page


class Tags(HTMLParser):
    """Checks that tags nest, and keeps them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_everything_of_a_run_is_there(page):
    text = page(
        run(
            facts={"reference": "the base model"},
            figures={"accuracy": (0.5, 0.75), "kl": (None, 1.25), "margin": (0.25, -0.5)},
            samples=[Sample("Once upon", "a time", "a hill")],
            notes=["Held-out pairs only."],
        )
    )
    assert "<dt>reference</dt><dd>the base model</dd>" in text
    cells = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td.*?>(.*?)</td><td.*?>(.*?)</td>', text)
    assert cells == [
        ("accuracy", "0.5000", "0.7500", "+0.2500"),
        ("kl", "–", "1.250", "–"),
        ("margin", "0.2500", "−0.5000", "−0.7500"),
    ]
    assert re.findall(r'<div class="said">(.*?)</div>', text) == ["Once upon", "a time", "a hill"]
    assert "<li>Held-out pairs only.</li>" in text
    assert all(f"<dt>{name}</dt>" in text for name in GLOSSARY)


def test_text_is_escaped_everywhere(page):
    bad = "<script>alert('1')</script> & \"q\""
    text = page(
        run(
            name=bad,
            facts={bad: bad},
            figures={bad: (1.0, 2.0)},
            samples=[Sample(bad, bad, bad)],
            notes=[bad],
        ),
        title=bad,
    )
    assert "<script" not in text
    # Title twice; facts twice; figure; sample thrice; note; alternative text of the plot. The name is within the title.
    assert text.count("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &#34;q&#34;") == 10
    Tags(text)


def test_the_page_needs_nothing_from_outside(page):
    text = page(run(), run(name="second"))
    tags = Tags(text).seen
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    assert "url(" not in text
    assert "@import" not in text
    sources = [attributes["src"] for tag, attributes in tags if tag == "img"]
    assert len(sources) == 2
    for source in sources:
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data)[:8] == b"\x89PNG\r\n\x1a\n"
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_only_panels_with_data_are_shown(page):
    text = page(run())
    assert re.findall(r'<img alt="(.*?)"', text) == ["Loss, over the steps of first"]
    assert "No metrics were logged" not in text
    assert "Figures" not in text
    assert "Samples" not in text
    assert "No metrics were logged" in page(run(history=History(())))


def test_several_runs_are_linked(page):
    text = page(run(), run(name="second"))
    tags = Tags(text).seen
    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert links == ["#run-1", "#run-2", "#words"]
    assert {link[1:] for link in links} <= {attributes.get("id") for _, attributes in tags}
    assert "<nav" not in page(run())


def test_an_empty_answer_and_broken_text_are_shown(page):
    text = page(run(samples=[Sample("p", "", "half \ud83d of a pair")]))
    assert '<div class="empty">(nothing)</div>' in text
    assert "half ? of a pair" in text


def test_a_failed_write_keeps_the_page_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "report.html"
    write_report([run()], path, "old")
    old = path.read_bytes()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        write_report([run()], path, "new")
    assert path.read_bytes() == old
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"report\.html: the report cannot be written"):
        write_report([run()], tmp_path / "file" / "report.html", "t")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.12345, "0.1235"),
        (-1.5, "−1.500"),
        (12.345, "12.35"),
        (-123.45, "−123.5"),
        (12345.0, "12,345.0"),
        (5e-6, "5.00e−06"),
        (3e7, "3.00e+07"),
        (math.nan, "nan"),
        (-math.inf, "−inf"),
    ],
)
def test_figures_are_readable(value, text):
    assert show(value) == text
