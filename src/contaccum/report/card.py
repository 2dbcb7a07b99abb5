"""`push`: a finished run's model on the hub, with a card whose figures are the run's own."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.inputs import readable
from contaccum.common.outputs import read_if_whole, sole_path, write_text
from contaccum.report.folders import Run, read_run_folder
from contaccum.report.numbers import duration, percent
from contaccum.report.rows import rows_of, value_text
from contaccum.report.summary import summarise

BEGIN, END = "<!-- results of the run -->", "<!-- end of the results -->"
PICTURES = "curves"  # folder beside the card
SPLITS = ("train", "dev", "test")
PLACES = ("data", "model", "passage_model", "tokenizer")
# Fields that do not decide what a run comes to, or that follow from its rows.
NO_MATTER = (
    *("output", "seed", "split", "limit", "warmup_updates", "dev", "dev_split", "dev_every", "dev_metric", "dev_passages"),
    *("save_every", "keep_checkpoints", "checkpoints_at_end", "log_every", "diagnose_every", "drift_every", "report_to"),
    *("memory", "gradient_checkpointing", "torch_compile", "unpad", "cuda_graphs", "tf32", "threads", "workers"),
)
LOADED = re.compile(r'^(model = SentenceTransformer\()"[^"\n]*"', re.MULTILINE)
UNKNOWN = re.compile(r"^<!-- - \*\*Base model:\*\* \[Unknown\].*-->$", re.MULTILINE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def push(run: str | Path, name: str, *, private: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Put the model of a finished run on the hub, with the run's metrics in its model card.

    Args:
        run: run folder that contaccum train wrote; its evaluation.json gives the metrics
        name: of the model on the hub, as user/name
        private: only for you and your organisation
        dry_run: write the card and upload nothing

    The card keeps what sentence-transformers wrote into it. Log in before, with `hf auth login`.
    """
    folder = Path(run)
    found = read_run_folder(folder)
    model = folder / "model"
    if not found.trained or not (model / "modules.json").exists():
        raise DataError(f"{folder} holds no finished model; give a run folder of contaccum train")
    api = None if dry_run else _opened(name, private)  # first: where it cannot be, nothing is written here
    card = write_card(found, model, name)
    if api is not None:
        with _on_hub(name):
            api.upload_folder(repo_id=name, folder_path=model, commit_message="Model and card")
    remark = None if found.evaluation is not None else _elsewhere(found)[1]
    return {"model": str(model), "card": str(card), "name": name, "uploaded": not dry_run, "note": remark}


def _opened(name: str, private: bool) -> Any:
    """The hub, with a place for this model."""
    from huggingface_hub import HfApi

    with _on_hub(name):
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
    return api


def _on_hub(name: str) -> AbstractContextManager[None]:
    return readable(f"the model cannot be put on the hub as {name}", "check the name, the connection and hf auth login")


def write_card(run: Run, model: Path, name: str) -> Path:
    """The card with the run's metrics, as a table and as the data that the hub reads; written again, it is the same."""
    from huggingface_hub import EvalResult, ModelCard

    file = model / "README.md"
    card: Any = ModelCard(file.read_text(encoding="utf-8") if file.exists() else f"# {name}\n", ignore_metadata_errors=True)
    if run.evaluation is not None:
        task: dict[str, Any] = {
            "task_type": "sentence-similarity",
            "task_name": "Retrieval",
            "dataset_type": "test",
            "dataset_name": _data_name(run),
        }
        results = [EvalResult(metric_type=metric, metric_value=value, **task) for metric, value in run.evaluation.metrics.items()]
        card.data.model_name, card.data.eval_results = name.rpartition("/")[2], results
    section = f"{BEGIN}\n{_section(run, _pictures(run, model))}\n{END}\n\n"
    text = _with_names(SECTION.sub("", card.text), run, name)
    place = text.find("## Training Details")
    card.text = text + "\n" + section if place < 0 else text[:place] + section + text[place:]
    with sole_path(file) as part:
        write_text(part, f"---\n{card.data.to_yaml()}\n---\n{card.text.lstrip()}")
    return file


def _with_names(text: str, run: Run, name: str) -> str:
    """What sentence-transformers did not know when it wrote the card: how the model is called, and what it was trained from."""
    started = dict.fromkeys(str(run.config[field]) for field in ("model", "passage_model") if run.config[field])
    text = LOADED.sub(lambda found: f'{found[1]}"{name}"', text)
    return UNKNOWN.sub(lambda _: f"- **Base model:** {' and '.join(map(_base_model, started))}", text)


def _base_model(source: str) -> str:
    """A name on the hub as a link, a folder by its name alone."""
    if HUB_NAME.fullmatch(source) and not Path(source).exists():
        return f"[{source}](https://huggingface.co/{source})"
    return f"`{Path(source).name}`"


def _data_name(run: Run) -> str:
    return Path(str(run.config["data"])).name or "test"


def _pictures(run: Run, model: Path) -> list[str]:
    """Its curves as files beside the card, and their lines; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from contaccum.report.figures import drawings
    from contaccum.report.svg import save

    lines = []
    for drawing in drawings(summarise(rows_of([run]))):
        if drawing.name == "loss" or drawing.title.endswith("by samples"):
            save(drawing.figure, model / PICTURES, drawing.name)
            lines += [f"![{drawing.title}]({PICTURES}/{drawing.name}.png)", ""]
    return lines


def _elsewhere(run: Run) -> tuple[list[str], str | None]:
    """Of a model that was trained on all rows by `compare`'s command: what the same settings reached there, on rows held out. And a note
    where the comparison beside it tells nothing of this model."""
    output = run.folder.parent
    found = (read_if_whole(output / "results.json") or {}).get("results", [])
    rows = [(row, cell) for row in found if row.get("metrics") and (cell := _cell(row, output)) is not None]
    alike = [(row, cell) for row, cell in rows if cell.config["method"] == run.config["method"]]
    if not alike:
        return ["It was not evaluated.", ""], None
    if missing := [split for split in SPLITS if split not in str(run.config["split"]).split("+")]:
        return ["It was not evaluated.", ""], _not_its_own(f"it was trained without the split {missing[0]}")
    if run.config["limit"] is not None:
        return ["It was not evaluated.", ""], _not_its_own(f"it was trained on {run.config['limit']:,} rows, not on all")
    differing = [_difference(run, cell) for _, cell in alike]
    if None not in differing:
        name, mine, theirs = next(one for one in differing if one is not None)
        return ["It was not evaluated.", ""], _not_its_own(f"{name} is {value_text(mine)} here and {value_text(theirs)} there")
    sentence = "Trained on all rows, so none is left to test it by. The same method and settings, trained without the test rows, reached:"
    return [sentence, "", *_table(alike[differing.index(None)][0]["metrics"])], None


def _not_its_own(reason: str) -> str:
    return f"The figures of the comparison beside this run are left out: {reason}."


def _cell(row: dict[str, Any], output: Path) -> Run | None:
    """The run behind a comparison's row, wherever the comparison has been moved to; None of a baseline."""
    folders = [output.joinpath(*Path(run["folder"]).parts[-3:]) for run in row.get("runs", [])]
    return next((read_run_folder(folder) for folder in folders if (folder / "config.yaml").is_file()), None)


def _difference(run: Run, cell: Run) -> tuple[str, Any, Any] | None:
    """The first field, with both values, in which two trainings differ that should give the same but for their rows."""
    for name, mine in run.config.items():
        theirs = cell.config.get(name)
        same = _same_place(mine, theirs) if name in PLACES else mine == theirs
        chosen = all(name in (one.provenance.get("auto") or []) for one in (run, cell))  # by the rows there are
        if name not in NO_MATTER and not same and not (chosen and name == "bank"):
            return name, mine, theirs
    return None


def _same_place(one: Any, other: Any) -> bool:
    """Paths may be written from different folders."""
    if one == other or one is None or other is None:
        return bool(one == other)
    short, long = sorted((Path(str(one)).parts, Path(str(other)).parts), key=len)
    return long[len(long) - len(short) :] == short


def _table(metrics: dict[str, float]) -> list[str]:
    return ["| metric | % |", "|---|---:|", *(f"| {metric} | {percent(value)} |" for metric, value in metrics.items()), ""]


def _section(run: Run, pictures: list[str]) -> str:
    config, lines = run.config, ["## Results of this run", ""]
    if run.evaluation is not None:
        lines += _table(run.evaluation.metrics)
        queries = max((len(values) for values in run.evaluation.per_query.values()), default=0)
        lines += [f"By exact search of the whole collection for {queries:,} test queries.", ""] if queries else []
    else:
        lines += _elsewhere(run)[0]
    lines += pictures
    seconds = run.measured("seconds")
    lines.append(
        f"Trained by contaccum, method {config['method']}: {config['n_total']} samples per update, "
        f"{config['n_local']} in memory at once, learning rate {config['lr']:g}, {config['epochs']:g} epochs, seed {config['seed']}"
        + (f", {duration(seconds)}." if seconds else ".")
    )
    return "\n".join(lines)
