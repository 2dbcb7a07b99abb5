"""One HTML file that needs nothing else: table, plots and what was run."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from contaccum.report.plots import as_svg, loss_curves, metric_bars, save_png
from contaccum.report.results import RunResult, best

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d8d8d8; --soft: #f4f4f2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --line: #3a3a3a; --soft: #222222; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 54rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .45rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.best { font-weight: 700; }
figure { margin: 1rem 0; background: #ffffff; border-radius: 8px; padding: .8rem; } figure svg { width: 100%; height: auto; }
figcaption { color: #444444; font-size: .9rem; } pre { background: var(--soft); padding: .8rem; overflow-x: auto; border-radius: 8px; }
@media print { body { margin: 0; } }
"""


def write_page(
    file: Path, title: str, introduction: str, results: list[RunResult], headline: str, provenance: dict[str, Any]
) -> list[Path]:
    """`file`, and beside it the plots as PNG. `introduction` is plain text; `headline` the metric of the bars."""
    figures = {"quality": metric_bars(results, headline), "loss": loss_curves(results)}
    pictures = []
    for name, figure in figures.items():
        pictures.append(file.with_name(f"{name}.png"))
        save_png(figure, pictures[-1])
    captions = {
        "quality": f"{headline} on the test queries, exact search over the whole collection.",
        "loss": "Training loss. Its height depends on the number of negatives; compare shapes, not heights.",
    }
    drawn = "".join(f"<figure>{as_svg(figure)}<figcaption>{captions[name]}</figcaption></figure>" for name, figure in figures.items())
    body = f"<h1>{html.escape(title)}</h1><p>{html.escape(introduction)}</p>{html_table(results)}{drawn}"
    run = html.escape(json.dumps(provenance, indent=1))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}<h2>How it was run</h2><pre>{run}</pre></body></html>\n"
    )
    file.write_text(page, encoding="utf-8")
    return pictures


def html_table(results: list[RunResult]) -> str:
    metrics = list(results[0].metrics)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["method", "negatives", *metrics, "seconds", "peak memory"])
    rows = []
    for result in results:
        cells = [html.escape(result.name), f"{result.negatives_per_query:,}"]
        cells = [f"<td>{cell}</td>" for cell in cells]
        for metric in metrics:
            mark = ' class="best"' if result.metrics[metric] == best(results, metric) else ""
            cells.append(f"<td{mark}>{100 * result.metrics[metric]:.1f}</td>")
        cells += [f"<td>{result.seconds:.0f}</td>", f"<td>{result.peak_bytes / 1e6:,.0f} MB</td>"]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
