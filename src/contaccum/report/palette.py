"""Colours and line styles: distinguishable for colour-blind readers, on white, on dark and, by their styles, in grey print."""

from __future__ import annotations

from typing import NamedTuple

INK = "#010203"  # of text and axes in a figure; in the page it becomes the text's colour
RULE = "#d5dade"  # of grid lines; in the page a variable
WHITE, NIGHT = "#ffffff", "#14181b"  # the pages' backgrounds


class Style(NamedTuple):
    light: str  # the colour on white, and in a figure
    dark: str  # the colour on NIGHT
    line: str
    marker: str


# Okabe and Ito's hues, darkened or lightened to 3:1 or more against their background.
STYLES = (
    Style("#0072b2", "#56b4e9", "-", "o"),
    Style("#c8511b", "#f0894f", "--", "s"),
    Style("#00805d", "#2fc397", "-.", "^"),
    Style("#a3477f", "#e08fc0", ":", "D"),
    Style("#8f6a00", "#e5b93c", "-", "v"),
    Style("#4a5a9f", "#9fb0f5", "--", "P"),
    Style("#b0303f", "#f58a94", "-.", "X"),
    Style("#59626a", "#b4bec6", ":", "*"),
)


def style(slot: int) -> Style:
    """Of a row's place; from the ninth on colours repeat, with other lines and markers."""
    turn, place = divmod(slot, len(STYLES))
    line, marker = (STYLES[(place + step * turn) % len(STYLES)] for step in (1, 3))
    return STYLES[place]._replace(line=line.line, marker=marker.marker)


def variable(place: int) -> str:
    return f"--series-{place}"


def css() -> str:
    """The variables that the page's figures use."""
    light = "".join(f"{variable(i)}:{s.light};" for i, s in enumerate(STYLES))
    dark = "".join(f"{variable(i)}:{s.dark};" for i, s in enumerate(STYLES))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
