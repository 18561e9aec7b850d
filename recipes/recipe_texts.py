"""Loads the text: from the embedded corpus, local files, or the Hub.

Rows are strings. Text files are read here, each line with its newline as a row. JSON, parquet and Hub data,
and all that is streamed, are read by `datasets`, which is imported only then, so that the recipe also runs
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import load_corpus
from recipe_options import DataArguments, RecipeError

SAMPLE = "sample"
LOCAL_WAYS = (
    "Two ways need no network: --dataset PATH (a local file or folder of text, JSON or parquet) and "
    "--dataset sample (the embedded corpus)."
)
LOADERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}

Rows = Any
"""``list[str]``, or a ``datasets.Dataset`` or ``IterableDataset`` (streamed) with one column ``text``."""


@dataclass(frozen=True)
class Texts:
    """Rows to train on, and to evaluate on; ``None``: there are none, as nothing is held out of a stream."""

    train: Rows
    evaluation: Rows | None


def load_texts(data: DataArguments) -> Texts:
    """Read the rows that ``--dataset`` and ``--validation_file`` name.

    Without a validation part the last ``validation_split_percentage`` of the training rows are held out,
    unless they are streamed.

    Raises:
        RecipeError: no such file, nothing to train on, no column of text, or the Hub cannot be reached.
    """
    if data.dataset == SAMPLE:
        if data.streaming:
            raise RecipeError("--streaming reads files and data of the Hub; the sample is held in memory.")
        embedded = load_corpus()
        parts: dict[str, Rows] = {"train": list(embedded.train), "evaluation": list(embedded.evaluation)}
    elif looks_local(data.dataset):
        parts = load_local(Path(data.dataset), data)
    else:
        parts = load_hub(data)
    if data.validation_file is not None:
        held_out = load_local(Path(data.validation_file), data, whole=True)
        parts["evaluation"] = held_out["train"]
    if "evaluation" not in parts and not data.streaming:
        parts = hold_out(parts["train"], data.validation_split_percentage)
    return Texts(parts["train"], parts.get("evaluation"))


def looks_local(name: str) -> bool:
    """Whether ``name`` is a path, not a Hub id: it exists, is absolute, or has the form of a path only."""
    path = Path(name)
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or path.suffix in LOADERS


def load_local(path: Path, data: DataArguments, *, whole: bool = False) -> dict[str, Rows]:
    """Read a file or folder into ``train`` and, where the folder has one, ``evaluation``.

    Args:
        path: a file, or a folder with its subfolders (only ``dataset_config_name``, if there is one).
        data: column and subfolder.
        whole: take every file of a folder, whatever its name, as one part called ``train``.

    Raises:
        RecipeError: nothing there, files of several kinds, or no file to train on.
    """
    path = path.expanduser()
    if not path.exists():
        raise RecipeError(f"There is no file or folder {path}.")
    if path.is_dir() and data.dataset_config_name and (path / data.dataset_config_name).is_dir():
        path = path / data.dataset_config_name
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.suffix in LOADERS)
    unreadable = [one.name for one in files if one.suffix not in LOADERS]
    if unreadable or not files:
        raise RecipeError(f"{path} is no text: expected {', '.join(LOADERS)}, or a folder of such files.")
    kinds = {LOADERS[one.suffix] for one in files}
    if len(kinds) > 1:
        raise RecipeError(
            f"The folder {path} mixes {' and '.join(sorted(kinds))} files; name one file or subfolder."
        )
    groups = {"train": files} if whole or path.is_file() else split_files(files)
    if "train" not in groups:
        names = ", ".join(one.name for one in files)
        raise RecipeError(
            f"The folder {path} has no file to train on, only {names}. "
            "Name the files: --dataset FILE --validation_file FILE."
        )
    return {part: _read_files(group, LOADERS[files[0].suffix], data) for part, group in groups.items()}


def split_files(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Divide files by the start of their names: ``val``, ``dev``, ``eval`` (else ``test``) evaluate.

    All others train, and files named ``test`` are left out if there are others to evaluate on.
    """
    groups: dict[str, list[Path]] = {"train": [], "valid": [], "test": []}
    for path in files:
        stem = path.stem.lower()
        part = "valid" if stem.startswith(("val", "dev", "eval")) else "train"
        groups["test" if stem.startswith("test") else part].append(path)
    evaluation = groups["valid"] or groups["test"]
    parts = {"train": groups["train"], "evaluation": evaluation}
    return {part: group for part, group in parts.items() if group}


def hold_out(rows: Rows, percentage: int) -> dict[str, Rows]:
    """Split off the last ``percentage`` of the rows, at least one."""
    if not 0 < percentage < 100 or len(rows) < 2:
        raise RecipeError(
            f"{percentage} % of {len(rows)} rows leave nothing to train or to evaluate on; "
            "give --validation_file or another --validation_split_percentage (1 to 99)."
        )
    cut = len(rows) - max(1, len(rows) * percentage // 100)
    if isinstance(rows, list):
        return {"train": rows[:cut], "evaluation": rows[cut:]}
    return {"train": rows.select(range(cut)), "evaluation": rows.select(range(cut, len(rows)))}


def load_hub(data: DataArguments) -> dict[str, Rows]:
    """Load a dataset of the Hub, or of its local cache.

    Raises:
        RecipeError: the dataset cannot be reached, does not exist, or has no training part.
    """
    name = f"'{data.dataset}'" + (f" ({data.dataset_config_name})" if data.dataset_config_name else "")
    datasets = _datasets()
    try:
        parts = datasets.load_dataset(data.dataset, data.dataset_config_name, streaming=data.streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # no network, no such name, ...
        reason = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"The dataset {name} could not be loaded from the Hub: {reason}\n{LOCAL_WAYS}"
        ) from error
    if "train" not in parts:
        raise RecipeError(f"The dataset {name} has no `train` part, only {', '.join(parts)}.")
    rows = {"train": as_rows(parts["train"], data.text_column)}
    for part in ("validation", "test"):
        if part in parts:
            return rows | {"evaluation": as_rows(parts[part], data.text_column)}
    return rows


def as_rows(dataset: Any, text_column: str | None) -> Any:
    """Reduce a ``datasets.Dataset`` or ``IterableDataset`` to one column of strings, called ``text``.

    Raises:
        RecipeError: the column does not exist, or there is no `text` and not exactly one column of strings.
    """
    if dataset.features is None:  # of a stream of JSON they are known once a row has been read
        dataset = dataset._resolve_features()
    strings = [
        name for name, feature in dataset.features.items() if getattr(feature, "dtype", None) == "string"
    ]
    column = text_column or ("text" if "text" in strings else strings[0] if len(strings) == 1 else None)
    if column not in strings:
        found = ", ".join(dataset.column_names)
        wanted = f"no column of strings called '{column}'" if column else "no column `text`"
        raise RecipeError(f"The data has {wanted}; its columns are {found}. Name one: --text_column NAME.")
    dataset = dataset.select_columns([column])
    return dataset if column == "text" else dataset.rename_column(column, "text")


def _read_files(files: Sequence[Path], kind: str, data: DataArguments) -> Rows:
    if kind == "text" and not data.streaming:
        return [line for path in files for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    names, datasets = [str(path) for path in files], _datasets()
    how = {"keep_linebreaks": True} if kind == "text" else {}
    try:
        loaded = datasets.load_dataset(
            kind, data_files={"train": names}, split="train", streaming=data.streaming, **how
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(f"{', '.join(names)} could not be read as {kind}: {error}") from error
    return as_rows(loaded, data.text_column)


def _datasets() -> Any:
    try:
        import datasets  # not needed for text files and the sample, and slow to import
    except ImportError as error:
        raise RecipeError(f"This needs `pip install datasets`. {LOCAL_WAYS}") from error
    return datasets
