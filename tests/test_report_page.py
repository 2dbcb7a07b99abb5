"""The report's page: nothing from outside, nothing unescaped, colours that can be read, and all of it at work in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from chromium import PROGRAM, Chromium
from contaccum.report.build import report
from contaccum.report.page import page as html_page
from contaccum.report.palette import INK, NIGHT, RULE, STYLES, WHITE
from contaccum.report.verdict import Answer
from report_runs import HOSTILE, make_run, summary_of, two_methods

FIGURES = 14


class Elements(HTMLParser):
    """Every element with its attributes, and the text of those that hold code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: str | None = None
        self.code: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            self.code.append((self.inside, data))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = two_methods(folder)
    report(
        runs, folder / "report.html", compare=[("gradaccum", "contaccum")], introduction=f"Introduced {HOSTILE}", title=f"Title {HOSTILE}"
    )
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text()
    elements = Elements(text)
    for tag, attributes in elements.found:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), attributes
    styles = "".join(code for tag, code in elements.code if tag == "style")
    assert "@import" not in styles
    assert "url(" not in styles
    assert "default-src 'none'" in text
    assert len(text) < 5_000_000


def test_hostile_texts_stay_texts(page: Path) -> None:
    elements = Elements(page.read_text())
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    data = json.loads(next(code for tag, code in elements.code if tag == "script"))
    assert any(HOSTILE in query["text"] for query in data["queries"])
    assert any(HOSTILE in text for _, text in data["texts"].values())


def test_figures_do_not_share_ids_and_follow_the_page(page: Path) -> None:
    elements = Elements(page.read_text())
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = [value for tag, attributes in elements.found if tag == "use" and (value := attributes.get("href"))]
    used += re.findall(r"url\((#[^)]*)\)", page.read_text())
    assert used
    assert {value.removeprefix("#") for value in used} <= set(ids)
    drawn = "".join(re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL))
    assert drawn.count("<svg") == FIGURES
    assert "var(--series-0)" in drawn
    assert "var(--series-1)" in drawn
    assert not set(re.findall(r"#[0-9a-f]{6}\b", drawn)) & {INK, RULE, *(style.light for style in STYLES)}


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_series_are_legible_on_white_and_on_dark() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for style in STYLES:
        assert contrast(style.light, WHITE) >= 4, style
        assert contrast(style.dark, NIGHT) >= 4, style
    assert len({(style.line, style.marker) for style in STYLES}) == len(STYLES)


def test_the_page_works_in_a_browser(page: Path, browser: Chromium) -> None:
    """No console errors, every plot visible, tables sort, the query browser sorts, filters and shows both rankings."""
    browser.problems.clear(), browser.requests.clear()
    browser.open(page)
    sizes = browser.run(
        "[...document.querySelectorAll('figure svg')].map(s => { const b = s.getBoundingClientRect(); return [b.width, b.height]; })"
    )
    assert len(sizes) == FIGURES
    assert all(width > 200 and height > 80 for width, height in sizes)
    assert browser.run("document.title").startswith("Title </script>")

    column = "[...document.querySelectorAll('table.sortable thead th')].findIndex(h => h.textContent === 'MRR@10')"
    names = "[...document.querySelectorAll('table.sortable tbody th')].map(h => h.textContent)"
    click = f"document.querySelectorAll('table.sortable thead button')[{column}].click()"
    assert browser.run(names) == ["gradaccum", "contaccum"]
    browser.run(click)
    assert browser.run(names) == ["contaccum", "gradaccum"]
    browser.run(click)
    assert browser.run(names) == ["gradaccum", "contaccum"]
    assert browser.run(f"document.querySelectorAll('table.sortable thead th')[{column}].ariaSort") == "ascending"

    # The pair that was asked for is open: the first seed of each.
    assert browser.run("[first.value, second.value]") == ["0", "2"]
    deltas = "[...document.querySelectorAll('#list .delta')].map(d => Number(d.textContent.replace('−', '-').replace('±', '')))"
    found = browser.run(deltas)
    assert len(found) == 20
    assert [abs(value) for value in found] == sorted((abs(value) for value in found), reverse=True)
    browser.run("order.value = 'first'; order.dispatchEvent(new Event('change'))")
    found = browser.run(deltas)
    assert found == sorted(found, reverse=True)
    browser.run("more.click()")
    assert browser.run("document.querySelectorAll('#list > li').length") == 30
    assert browser.run("more.hidden")

    search = "document.getElementById('find').value = '{}'; document.getElementById('find').dispatchEvent(new Event('input'))"
    browser.run(search.format("number 1 "))
    shown = browser.run("[...document.querySelectorAll('#list .query')].map(q => q.textContent)")
    assert any(HOSTILE.split()[0] in text for text in shown)
    browser.run(search.format("QUERY 17"))
    assert browser.run("[...document.querySelectorAll('#list .query')].map(q => q.textContent.trim())") == ["query number 17"]
    browser.run("document.querySelector('#list summary').click()")
    browser.run("new Promise(done => setTimeout(done, 50))")
    data = json.loads(next(code for tag, code in Elements(page.read_text()).code if tag == "script"))
    query = next(query for query in data["queries"] if query["id"] == "q17")
    for side, run in enumerate((0, 2)):
        place = f"document.querySelectorAll('.sides > div')[{side}]"
        assert browser.run(f"{place}.querySelector('h4').textContent") == data["runs"][run]
        passages = browser.run(
            f"[...{place}.querySelectorAll('li')].map(l => [l.className, l.firstChild.textContent, l.lastChild.textContent])"
        )
        assert [kind for kind, _, _ in passages].count("relevant") == 1
        relevant = next((rank, text) for kind, rank, text in passages if kind == "relevant")
        assert relevant[0] == ("–" if query["first"][run] is None else str(query["first"][run]))
        assert "passage 17" in relevant[1]
        texts = [data["texts"][key] for key in query["top"][run]]
        assert [text.removeprefix("relevant ") for _, _, text in passages[:10]] == [f"{title} {text}" for title, text in texts]
    browser.run("second.value = '3'; second.dispatchEvent(new Event('change'))")
    browser.run(search.format("no such words"))
    assert browser.run("document.querySelectorAll('#list > li').length") == 0
    assert browser.run("document.title").startswith("Title </script>"), "a hostile text was run"
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


def test_the_page_fits_a_phone_and_follows_dark_mode(page: Path, browser: Chromium, tmp_path: Path) -> None:
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    browser.open(page, width=360, height=640)
    browser.run("document.querySelector('#list summary').click()")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    smallest = (
        "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.getScreenCTM().a))"
    )
    assert browser.run(smallest) >= 9.5  # CSS pixels
    light = browser.run(ink)
    browser.open(page, dark=True)
    dark = browser.run(ink)
    assert (light, dark) == ("rgb(28, 34, 38)", "rgb(227, 231, 234)")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb({}, {}, {})".format(*bytes.fromhex(NIGHT[1:]))
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_name_of_an_option_is_not_broken_after_its_hyphens(browser: Chromium, tmp_path: Path) -> None:
    answer = Answer(["Use it."], f"contaccum train --data {'a/' * 40} --max-seq-length 16 <x>", "To train:")
    summary = summary_of([make_run(tmp_path / "run")])
    (tmp_path / "page.html").write_text(html_page(summary, [], {}, None, "", "One", "", {}, answer))
    browser.open(tmp_path / "page.html", width=390)
    assert browser.run("document.querySelector('pre.command').textContent") == answer.command
    lines = "Math.max(...[...document.querySelectorAll('pre.command span')].map(name => name.getClientRects().length))"
    assert browser.run(lines) == 1


@pytest.mark.parametrize("runs", [8, 45])
def test_configurations_of_many_runs_fit_a_printed_page(browser: Chromium, tmp_path: Path, runs: int) -> None:
    """With values of every length, and names that have no place to be broken at."""
    fields = ("model", "tokenizer", "data", "report_to", "split", "pooling", "bank_dtype", "precision", "dev_metric", "dev_split")
    folders = [
        make_run(tmp_path / f"{'long' * 8}{i}", lr=1e-5 * (i + 1), **{f: "x" * (i % 5) * 8 + str(i) for f in fields}) for i in range(runs)
    ]
    (tmp_path / "page.html").write_text(html_page(summary_of(folders), [], {}, None, "", "Many", "", {}, Answer(["Many runs."])))
    browser.open(tmp_path / "page.html", width=718)  # A4 with margins of a centimetre
    browser.call("Emulation.setEmulatedMedia", media="print")
    widest = "Math.max(...[...document.querySelectorAll('#configuration table')].map(t => t.getBoundingClientRect().right))"
    assert 0 < browser.run(widest) <= 718
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize(("width", "columns"), [(1280, {3: 3, 4: 2, 5: 3}), (800, {3: 2, 4: 2, 5: 2}), (390, {3: 1, 4: 1, 5: 1})])
def test_no_figure_is_larger_than_the_others(width: int, columns: dict[int, int], page: Path, browser: Chromium) -> None:
    """Four stand two by two on a wide screen; a last one alone does not fill its row."""
    browser.open(page, width)
    for count, expected in columns.items():
        drawn = browser.run(
            "(() => { const grid = document.querySelector('.figures'); const first = grid.children[0];"
            f"while (grid.children.length > {count}) grid.lastChild.remove();"
            f"while (grid.children.length < {count}) grid.append(first.cloneNode(true));"
            "return [...grid.children].map(c => c.getBoundingClientRect()).map(box => [Math.round(box.x), Math.round(box.width)]) })()"
        )
        assert len({x for x, _ in drawn}) == expected
        widths = {wide for _, wide in drawn}
        assert max(widths) - min(widths) <= 1
        assert max(widths) <= 400
