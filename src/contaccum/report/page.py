"""One HTML file that needs nothing else: verdict, tables, plots, and a browser of queries.

All texts are escaped. The query browser's data stand in an element that no browser runs, and the script puts them into the page as text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from contaccum.report import palette
from contaccum.report.figures import Drawing
from contaccum.report.queries import Browser, as_embedded
from contaccum.report.summary import Summary, notes
from contaccum.report.svg import page_svg
from contaccum.report.tables import as_html, difference_tables, legend, pair_table, summary_table
from contaccum.report.verdict import Answer

# Nothing is loaded from anywhere, whatever a text may hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    summary: Summary,
    drawn: Sequence[Drawing],
    pictures: Mapping[str, str],
    browser: Browser | None,
    reason: str,
    title: str,
    introduction: str,
    provenance: Mapping[str, Any],
    answer: Answer,
) -> str:
    """The whole file. `pictures` are the drawings as SVG; `reason` says why there is no browser."""
    figures = {part: "".join(_figure(d, pictures[d.name]) for d in drawn if d.part == part) for part in ("results", "training")}
    parts = {
        "Results": _results(summary) + _figures(figures["results"]),
        "Comparisons": "".join(_pair(summary, place) for place in range(len(summary.pairs))),
        "Training": _figures(figures["training"]),
        "Configuration": _differences(summary),
        "Queries": f"<p>{html.escape(reason)}</p>" if browser is None else _browser(browser),
        "How it was run": _runs(summary, provenance),
    }
    sections = {name: body for name, body in parts.items() if body}
    links = " ".join(f'<a href="#{_key(name)}">{html.escape(name)}</a>' for name in sections)
    intro = "".join(f"<p>{html.escape(text)}</p>" for text in introduction.split("\n\n") if text)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{palette.css()}{_asset('page.css')}</style></head>\n"
        f"<body><header><h1>{html.escape(title)}</h1>{_answer(answer)}{intro}"
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>'
        + "\n".join(f'<section id="{_key(name)}"><h2>{html.escape(name)}</h2>{body}</section>' for name, body in sections.items())
        + f"</main>\n{_data(summary, browser)}<script>{_asset('page.js')}</script></body></html>\n"
    )


def _answer(answer: Answer) -> str:
    headline, *details = answer.sentences
    listed = "".join(f"<li>{html.escape(detail)}</li>" for detail in details)
    block = f'<p>{html.escape(answer.command_for)}</p><pre class="command">{_unbroken(answer.command or "")}</pre>'
    command = block if answer.command else ""
    return f'<p class="verdict">{html.escape(headline)}</p>' + (f"<ul>{listed}</ul>" if listed else "") + command


def _unbroken(command: str) -> str:
    """The name of an option is not broken after its hyphens."""
    return " ".join(f"<span>{word}</span>" if word.startswith("--") else word for word in html.escape(command).split(" "))


def _key(name: str) -> str:
    return name.lower().replace(" ", "-")


def _asset(name: str) -> str:
    return files("contaccum.report").joinpath(name).read_text(encoding="utf-8")


def _results(summary: Summary) -> str:
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes(summary))
    below = f'<p class="small">{html.escape(legend(summary))}</p>' + (f'<ul class="small">{remarks}</ul>' if remarks else "")
    return as_html(summary_table(summary), "Results, a line per method", "sortable") + below


def _pair(summary: Summary, place: int) -> str:
    pair = summary.pairs[place]
    title = f"{pair.first.name} against {pair.second.name}"
    if not pair.tests:
        return f"<h3>{html.escape(title)}</h3><p>They have no values per query of the same queries, so that nothing can be tested.</p>"
    return f"<h3>{html.escape(title)}</h3>{as_html(pair_table(pair), title)}"


def _figures(figures: str) -> str:
    return f'<div class="figures">{figures}</div>' if figures else ""


def _figure(drawing: Drawing, picture: str) -> str:
    drawn = page_svg(picture, drawing.name, drawing.title)
    return f"<figure><h3>{html.escape(drawing.title)}</h3>{drawn}<figcaption>{html.escape(drawing.caption)}</figcaption></figure>"


def _differences(summary: Summary) -> str:
    if sum(row.trained for row in summary.rows) < 2:
        return ""
    tables = difference_tables(summary.rows)
    if not tables:
        return "<p>The configurations are the same.</p>"
    note = "<p>The fields in which the runs differ; all others are the same.</p>"
    return note + "".join(as_html(table, "Differences", "wrapped") for table in tables)


def _browser(browser: Browser) -> str:
    names = [html.escape(name) for name in browser.runs]
    options = ["".join(f'<option value="{place}">{name}</option>' for place, name in enumerate(names)) for _ in range(2)]
    return (
        f'<p>{html.escape(browser.description())}</p><form class="controls" id="controls" hidden>'
        f'<label>First run <select id="first">{options[0]}</select></label>'
        f'<label>Second run <select id="second">{options[1]}</select></label>'
        '<label>Order <select id="order"><option value="either">largest difference</option><option value="first">first run better</option>'
        '<option value="second">second run better</option><option value="worst">both poor</option></select></label>'
        '<label>Find <input id="find" type="search" placeholder="words of the query" autocomplete="off"></label></form>'
        '<p class="small" id="shown" aria-live="polite"></p><ol class="queries" id="list"></ol>'
        '<button type="button" id="more" hidden>Show more</button><noscript><p>The query browser needs JavaScript.</p></noscript>'
        '<p class="print-only">The queries are to be browsed on a screen.</p>'
    )


def _runs(summary: Summary, provenance: Mapping[str, Any]) -> str:
    runs = [run for row in summary.rows for run in row.runs]
    by_name = {**({"report": dict(provenance)} if provenance else {}), **{str(run.folder): run.provenance for run in runs}}
    return "".join(f"<details><summary>{html.escape(name)}</summary><pre>{_json(value)}</pre></details>" for name, value in by_name.items())


def _json(value: Any) -> str:
    return html.escape(json.dumps(value, indent=1, ensure_ascii=False))


def _data(summary: Summary, browser: Browser | None) -> str:
    """The browser's data, and the two runs with which it opens: the first pair that was asked for, else the two best."""
    if browser is None:
        return ""
    pair = summary.pairs[0] if summary.pairs else None
    ranked = summary.ranked()
    opened = (pair.first, pair.second) if pair else (ranked[0], ranked[min(1, len(ranked) - 1)])
    start = [browser.rows.index(row.name) if row.name in browser.rows else 0 for row in opened]
    return f'<script type="application/json" id="data">{as_embedded({**browser.as_json(), "start": start})}</script>\n'
