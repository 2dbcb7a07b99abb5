"""A data set by its name, brought into the form that cells read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.outputs import read_if_whole, whole_path, write_json, write_jsonl, write_text
from contaccum.data.readers.beir import is_beir, qrels_file, read_qrels
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.queries import Query, read_queries
from contaccum.data.training_set import has_negatives, load_training_set
from contaccum.experiments.grid import DATASETS, DataSet, Scale

HARVESTED, HARVEST_TEST = 20_000, 1000


@dataclass(frozen=True)
class Ready:
    """What a cell trains on and is judged by. Paths; `qrels` None: by answers."""

    train: str
    collection: str
    queries: str
    split: str | None
    qrels: str | None
    match: str
    metrics: tuple[str, ...]
    hard_negatives: bool
    whole_collection: str = ""  # of which `collection` may be a part


def check_source(name: str, source: Path | None) -> None:
    """DataError where files are needed that are not there."""
    if DATASETS[name].form != "harvest" and (source is None or not source.is_dir()):
        given = "none was given" if source is None else f"{source} is no folder"
        raise DataError(f"{name} needs --data, the folder with its files ({given}); contaccum prepare --download fetches the public ones")


def ready(name: str, source: Path | None, folder: Path, scale: Scale) -> Ready:
    """Prepare the data set once under `folder`; what is there already is used again."""
    if name not in DATASETS:
        raise ValueError(f"dataset {name!r} is unknown; choose one of {', '.join(DATASETS)}")
    known = folder / "ready.json"
    if (stored := read_if_whole(known)) is not None:
        return Ready(**{**stored, "metrics": tuple(stored["metrics"])})
    dataset = DATASETS[name]
    check_source(name, source)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"harvest": _harvested, "beir": _beir, "msmarco": _msmarco, "dpr": _dpr}[dataset.form](dataset, source or folder, folder, scale)
    write_json(known, asdict(found))
    return found


def _harvested(dataset: DataSet, source: Path, folder: Path, scale: Scale) -> Ready:
    from contaccum.data.harvest import harvest, write_beir

    data = folder / "harvest"
    if not is_beir(data):
        test = scale.queries or HARVEST_TEST
        with whole_path(data) as part:
            write_beir(harvest(limit=HARVESTED if scale.rows is None else scale.rows + test), part, test=test)
    return _judged(dataset, data, data, data, data)


def _beir(dataset: DataSet, source: Path, folder: Path, scale: Scale) -> Ready:
    beir = source / "beir" if is_beir(source / "beir") else source  # of a prepared folder
    return _judged(dataset, source, beir, *_smaller_beir(dataset, beir, folder, scale))


def _msmarco(dataset: DataSet, source: Path, folder: Path, scale: Scale) -> Ready:
    from contaccum.data.prepare import prepare

    if not (folder / "train").exists():
        prepare(str(source), folder / "train", "msmarco", max_negatives=5)
    beir = source if is_beir(source) else source / "msmarco"
    return _judged(dataset, folder / "train", beir, *_smaller_beir(dataset, beir, folder, scale))


def _judged(dataset: DataSet, train: Path, whole: Path, collection: Path, judged: Path) -> Ready:
    negatives = has_negatives(load_training_set(train, "train", limit=1000))
    judging = (str(collection), str(judged), dataset.split, str(judged), dataset.match, dataset.metrics)
    return Ready(str(train), *judging, negatives, str(whole))


def _smaller_beir(dataset: DataSet, source: Path, folder: Path, scale: Scale) -> tuple[Path, Path]:
    """(collection, folder of queries and qrels): the source itself, or a part of it with all that is relevant."""
    if scale.queries is None and scale.passages is None:
        return source, source
    small = folder / "small"
    qrels = dict(islice(read_qrels(qrels_file(source, dataset.split)).items(), scale.queries))
    lines = [f"{query}\t{doc}\t{grade}\n" for query, grades in qrels.items() for doc, grade in grades.items()]
    write_text(small / "qrels" / f"{dataset.split}.tsv", "query-id\tcorpus-id\tscore\n" + "".join(lines))
    asked = [query for query in read_queries(source, dataset.split) if query.id in qrels]
    write_jsonl(small / "queries.jsonl", ({"_id": query.id, "text": query.text} for query in asked))
    relevant = {doc for grades in qrels.values() for doc in grades}
    _write_some(small / "corpus.jsonl", source, lambda key, text: key in relevant, scale.passages)
    return small, small


def _dpr(dataset: DataSet, source: Path, folder: Path, scale: Scale) -> Ready:
    from contaccum.data.prepare import prepare

    whole = collection = next((path for path in sorted(source.iterdir()) if ".tsv" in path.suffixes), None)
    if whole is None or collection is None:
        raise DataError(f"{source} holds no passages .tsv (also .gz, .xz); put psgs_w100.tsv.gz there")
    train = folder / "train"
    if not train.exists():
        prepare(str(source), train)
    if not has_negatives(load_training_set(train, "train", limit=1000)):
        train = _mined(train, collection, folder / "mined")
    test = next((path for path in sorted(source.iterdir()) if "-test." in path.name), None)
    if test is None:
        raise DataError(f"{source} holds no test questions (a file named ...-test.json or ...-test.qa.csv)")
    queries = read_queries(test)
    if scale.queries is not None or scale.passages is not None:
        queries = queries[: scale.queries]
        collection = _passages_for(queries, collection, folder / "small.jsonl", dataset.match, scale.passages)
        test = folder / "queries.jsonl"
        write_jsonl(test, ({"_id": q.id, "text": q.text, "answers": q.answers} for q in queries))
    metrics = ("Top@1", "Top@5", "Top@20", "Top@100")
    return Ready(str(train), str(collection), str(test), None, None, dataset.match, metrics, True, str(whole))


def _mined(train: Path, collection: Path, output: Path) -> Path:
    from contaccum.data.mine import mine

    if not output.exists():
        mine(train, collection, output)
    return output


def _passages_for(queries: list[Query], collection: Path, file: Path, match: str, others: int | None) -> Path:
    """A part of the collection: passages with an answer to one of the queries, and others."""
    from contaccum.data.answers import has_answer

    wanted = [answer for query in queries for answer in query.answers]
    _write_some(file, collection, lambda key, text: has_answer(wanted, text, match), others, at_most=others)
    return file


def _write_some(file: Path, collection: Path, is_wanted: Any, others: int | None, at_most: int | None = None) -> None:
    """Passages that are wanted (the first `at_most`) and the first `others` that are not, as JSONL."""

    def chosen() -> Iterable[dict[str, str]]:
        left, room = others, at_most
        for key, title, text in read_collection_of(collection):
            if room != 0 and is_wanted(key, text):
                room = None if room is None else room - 1
            elif left == 0:
                if room == 0:
                    return
                continue
            else:
                left = None if left is None else left - 1
            yield {"_id": key, "title": title, "text": text}

    write_jsonl(file, chosen())


def corpus_texts(data: Ready, count: int) -> Iterable[str]:
    """Some of its texts, for a tokenizer to learn from."""
    passages = (f"{title} {text}" for _, title, text in read_collection_of(data.collection))
    yield from islice(passages, count)
    yield from (query.text for query in read_queries(data.queries, data.split)[:count])
