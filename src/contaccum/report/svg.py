"""A figure as an <svg> of the page, which follows its colours, and as files of its own."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from contaccum.report.palette import INK, RULE, STYLES, variable
from contaccum.report.plots import look

NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # of metadata: the same data give the same file


def save(figure: Any, folder: Path, name: str) -> str:
    """Write NAME.png, on white, and NAME.svg; return the latter's text, for `page_svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white", metadata={"Software": None})
    buffer = io.StringIO()
    with look(**{"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=NOTHING)
    (folder / f"{name}.svg").write_text(buffer.getvalue(), encoding="utf-8")
    return buffer.getvalue()


def page_svg(text: str, name: str, label: str) -> str:
    """An element for the page: text and axes in its ink, series in its variables, ids that start with `name`."""
    opening, rest = text[text.index("<svg") :].split(">", 1)
    opening = re.sub(r'\s(?:xmlns(?::xlink)?|width|height|version)="[^"]*"', "", opening)
    rest = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", rest, flags=re.DOTALL)  # its rule `*` would reach the whole page
    rest = rest.replace("xlink:href", "href").replace(' id="', f' id="{name}-')
    rest = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", rest)
    series = {style.light: f"var({variable(place)})" for place, style in enumerate(STYLES)}
    for colour, themed in {INK: "currentColor", RULE: "var(--rule)", **series}.items():
        rest = rest.replace(colour, themed)
    return f'{opening} role="img" aria-label="{html.escape(label)}">{rest}'.strip()
