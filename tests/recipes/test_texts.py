"""Where the text comes from: local files in every form, held-out parts, and the message without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from recipe_options import DataArguments, RecipeError
from recipe_texts import LOCAL_WAYS, as_rows, hold_out, load_texts, looks_local, split_files

datasets = pytest.importorskip("datasets", reason="only the recipes need it")

LINES = ["one\n", "two\n", "\n", "three\n", "no newline at the end"]


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` writes what it reads into its cache: not into the user's."""
    cache = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def test_a_text_file_is_read_whole_and_its_end_is_held_out(text_file: Path) -> None:
    texts = load_texts(DataArguments(dataset=str(text_file), validation_split_percentage=40))
    assert texts.train == LINES[:3]
    assert texts.evaluation == LINES[3:]


def test_a_validation_file_leaves_the_training_text_whole(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("held out\n", encoding="utf-8")
    texts = load_texts(DataArguments(dataset=str(text_file), validation_file=str(tmp_path / "other.txt")))
    assert texts.train == LINES
    assert texts.evaluation == ["held out\n"]


def test_the_parts_of_wikitext_can_be_named_one_by_one(wikitext_dir: Path) -> None:
    valid, test = wikitext_dir / "valid.txt", wikitext_dir / "test.txt"
    texts = load_texts(DataArguments(dataset=str(valid), validation_file=str(test)))
    assert "".join(texts.train) == valid.read_text(encoding="utf-8")
    assert "".join(texts.evaluation) == test.read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_json_and_parquet_files(form: str, tmp_path: Path) -> None:
    rows = [{"text": line, "id": index} for index, line in enumerate(LINES)]
    path = tmp_path / f"data.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        text = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")
    texts = load_texts(DataArguments(dataset=str(path), validation_split_percentage=20))
    assert list(texts.train["text"]) == LINES[:4]
    assert list(texts.evaluation["text"]) == LINES[4:]
    assert texts.train.column_names == ["text"]


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_a_stream_has_the_same_rows_and_holds_none_out(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{form}"
    if form == "parquet":
        datasets.Dataset.from_dict({"id": range(5), "words": LINES}).to_parquet(path)
    else:
        rows = (json.dumps({"id": index, "words": line}) for index, line in enumerate(LINES))
        path.write_text("".join(LINES) if form == "txt" else "\n".join(rows), encoding="utf-8")
    texts = load_texts(DataArguments(dataset=str(path), streaming=True))
    assert [row["text"] for row in texts.train] == LINES
    assert not hasattr(texts.train, "__len__")
    assert texts.evaluation is None
    beside = load_texts(DataArguments(dataset=str(path), streaming=True, validation_file=str(path)))
    assert [row["text"] for row in beside.evaluation] == LINES


def test_the_sample_is_no_stream() -> None:
    with pytest.raises(RecipeError, match="--streaming"):
        load_texts(DataArguments(dataset="sample", streaming=True))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"no parquet at all")
    with pytest.raises(RecipeError, match=r"broken\.parquet could not be read as parquet"):
        load_texts(DataArguments(dataset=str(path)))


def test_a_folder_is_parted_by_the_names_of_its_files(tmp_path: Path) -> None:
    for name in ("a", "b", "valid_1", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n", encoding="utf-8")
    texts = load_texts(DataArguments(dataset=str(tmp_path)))
    assert texts.train == ["a\n", "b\n"]
    assert texts.evaluation == ["valid_1\n"]


def test_a_subfolder_is_chosen_by_the_configuration_name(tmp_path: Path) -> None:
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
        for part in ("train", "test"):
            (tmp_path / folder / f"{part}.txt").write_text(f"{folder} {part}", encoding="utf-8")
    texts = load_texts(DataArguments(dataset=str(tmp_path), dataset_config_name="small"))
    assert (texts.train, texts.evaluation) == (["small train"], ["small test"])


def test_the_parts_of_a_folder() -> None:
    files = [Path(name) for name in ("Dev.txt", "test.txt", "text.txt", "train.txt", "validation.txt")]
    names = {part: [path.stem for path in group] for part, group in split_files(files).items()}
    assert names == {"train": ["text", "train"], "evaluation": ["Dev", "validation"]}


def test_a_folder_without_training_files_is_rejected(tmp_path: Path) -> None:
    for name in ("test", "valid"):
        (tmp_path / f"{name}.txt").write_text("text", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_texts(DataArguments(dataset=str(tmp_path)))
    assert str(caught.value) == (
        f"The folder {tmp_path} has no file to train on, only test.txt, valid.txt. "
        "Name the files: --dataset FILE --validation_file FILE."
    )


def test_what_cannot_be_read_as_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no file or folder .*missing\.txt\."):
        load_texts(DataArguments(dataset=str(tmp_path / "missing.txt")))
    with pytest.raises(RecipeError, match=r"is no text: expected \.txt"):
        load_texts(DataArguments(dataset=str(tmp_path)))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(RecipeError, match="mixes json and text files"):
        load_texts(DataArguments(dataset=str(tmp_path)))


@pytest.mark.parametrize(("rows", "percentage"), [(["only"], 5), (["a", "b"], 0), (["a", "b"], 100)])
def test_a_split_that_leaves_nothing_is_rejected(rows: list[str], percentage: int) -> None:
    with pytest.raises(RecipeError, match="leave nothing to train or to evaluate on"):
        hold_out(rows, percentage)


def test_the_column_of_the_text() -> None:
    two = datasets.Dataset.from_dict({"title": ["t"], "body": ["b"], "stars": [1]})
    assert as_rows(two, "body")["text"][:] == ["b"]
    assert as_rows(two.select_columns(["body", "stars"]), None)["text"][:] == ["b"]
    with pytest.raises(RecipeError) as caught:
        as_rows(two, None)
    assert str(caught.value) == (
        "The data has no column `text`; its columns are title, body, stars. Name one: --text_column NAME."
    )
    with pytest.raises(RecipeError, match="no column of strings called 'stars'"):
        as_rows(two, "stars")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Salesforce/wikitext", False),
        ("wikitext", False),
        ("./wikitext", True),
        ("/data/wikitext", True),
        ("corpus/part.jsonl", True),
    ],
)
def test_paths_are_told_from_hub_ids(name: str, expected: bool) -> None:
    assert looks_local(name) is expected


def test_offline_the_message_names_the_local_ways() -> None:
    with pytest.raises(RecipeError) as caught:
        load_texts(DataArguments(dataset_config_name="wikitext-2-raw-v1"))
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "The dataset 'Salesforce/wikitext' (wikitext-2-raw-v1) could not be loaded from the Hub: "
    )
    assert second == LOCAL_WAYS
    assert second == (
        "Two ways need no network: --dataset PATH (a local file or folder of text, JSON or parquet) and "
        "--dataset sample (the embedded corpus)."
    )


def test_text_and_sample_need_no_datasets_library(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_texts(DataArguments(dataset=str(text_file))).train == LINES[:4]
    sample = load_texts(DataArguments(dataset="sample"))
    assert len(sample.train) > len(sample.evaluation) > 0
    with pytest.raises(RecipeError, match=r"This needs `pip install datasets`\. Two ways need no network"):
        load_texts(DataArguments())
