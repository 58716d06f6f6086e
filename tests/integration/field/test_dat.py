"""Data: what is wrong with a file is said before training, with its place; what was fitted stays with the run."""

from __future__ import annotations

import math
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from field_data import (
    PICTURES,
    SMALL,
    TABLE,
    TEXTS,
    table_rows,
    text_rows,
    write_csv,
    write_pictures,
    write_table,
)

from leyden.errors import DataError
from leyden.runs.evaluate import evaluate_run
from leyden.runs.predict import predict_file
from leyden.runs.restore import load_checkpoint, restore

HEADER = ("x1", "x2", "y")


def refused(result: object, *words: str) -> None:
    """Asserts that a run ended with one DataError that has these words, before any checkpoint."""
    assert result.exit_code == 1, result.output
    assert "DataError" in result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, f"{word} not in {result.output}"
    assert not list(result.folder.rglob("*.ckpt"))


# ---- DAT-01: missing and infinite cells ------------------------------------------------------------------------

HOLES = {3: (0, ""), 20: (0, ""), 33: (0, "nan"), 7: (1, "inf")}  # row from 0 -> column, cell


def write_holes() -> list[list]:
    rows = table_rows(40)
    for row, (column, cell) in HOLES.items():
        rows[row][column] = cell
    write_csv("table.csv", HEADER, rows)
    return rows


def test_dat_01_missing_cells_are_named_by_file_column_and_row(train: Callable, workspace: Path) -> None:
    write_holes()
    result = train(*SMALL, *TABLE)
    # Rows are counted from 1 below the header
    refused(result, "table.csv", "`x1` (3 of 40: rows 4, 21, 34)", "`x2` (1 of 40: row 8)", "data.impute=mean")


def test_dat_01_imputation_takes_the_training_mean_and_keeps_it(train: Callable, workspace: Path) -> None:
    rows = write_holes()
    result = train(*SMALL, *TABLE, "data.impute=mean")
    assert result.exit_code == 0, result.output
    assert all(math.isfinite(value) for value in result.metrics.values())
    fitted = load_checkpoint(result.folder).data_state["fitted"]
    assert fitted["impute"] == "mean"
    train_rows = split_rows_of(rows, result.folder)
    for column, mean in enumerate(fitted["means"]):
        known = [float(row[column]) for row in train_rows if row[column] not in ("", "nan", "inf")]
        assert mean == pytest.approx(np.mean(known), abs=1e-9)
    # A missing cell and the mean itself are the same input
    write_csv("new.csv", HEADER[:2], [["", 0.5], [fitted["means"][0], 0.5], ["inf", 0.5]])
    missing, mean, infinite = predict_file(result.folder, Path("new.csv"))["prediction"]
    assert missing == infinite == pytest.approx(mean, abs=1e-6)


def split_rows_of(rows: list[list], run: Path) -> list[list]:
    """The training rows of table.csv, by the config of a run."""
    from leyden.data.splits import split_rows

    data = load_checkpoint(run).config["data"]
    keys = pl.read_csv("table.csv", infer_schema=False).drop("y").rows()
    chosen = split_rows(keys, data["val_frac"], data["test_frac"], data["split_seed"])
    return [rows[index] for index in chosen["train"]]


@pytest.mark.parametrize("cell", ["", "inf", "-inf", "nan"])
def test_dat_01_missing_target_is_refused_also_with_imputation(train: Callable, workspace: Path, cell: str) -> None:
    rows = table_rows(40)
    rows[31][2] = cell
    write_csv("table.csv", HEADER, rows)
    refused(train(*SMALL, *TABLE, "data.impute=mean"), "table.csv", "target `y`", "1 row(s) (row 32)")


# ---- DAT-02: cells that are no numbers, columns that are not there ---------------------------------------------


def test_dat_02_text_cells_are_named_by_column_row_and_text(train: Callable, workspace: Path) -> None:
    rows = table_rows(40)
    rows[9][1], rows[30][1], rows[35][1] = "1,234", "n/a", "?"
    write_csv("table.csv", HEADER, rows)
    refused(train(*SMALL, *TABLE), "table.csv: column `x2` has 3 value(s)", "rows 10, 31, 36: '1,234', 'n/a', '?'")


def test_dat_02_text_in_the_target_or_a_test_table_is_named_too(train: Callable, workspace: Path) -> None:
    rows = table_rows(40)
    rows[12][2] = "dear"
    write_csv("table.csv", HEADER, rows)
    refused(train(*SMALL, *TABLE), "column `y`", "row 13: 'dear'")
    write_table("table.csv", 40)
    write_csv("other.csv", HEADER, rows)
    refused(train(*SMALL, *TABLE, "data.test_path=other.csv"), "other.csv", "column `y`", "row 13: 'dear'")


def test_dat_02_missing_columns_list_those_there_are(train: Callable, workspace: Path) -> None:
    write_table("table.csv", 20)
    refused(train(*SMALL, *TABLE, "data.target=price"), "no column `price` (data.target)", "Columns: x1, x2, y")
    refused(train(*SMALL, *TABLE, "data.features=[x1,x9]"), "no column `x9` (data.features)", "Columns: x1, x2, y")


def test_dat_02_blanks_round_column_names_are_stripped(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", ("x1 ", " x2", " y "), table_rows(40))
    result = train(*SMALL, *TABLE)
    assert result.exit_code == 0, result.output
    assert load_checkpoint(result.folder).data_state["facts"]["feature_names"] == ["x1", "x2"]


# ---- DAT-04: empty splits --------------------------------------------------------------------------------------


def test_dat_04_tables_without_rows_name_the_file(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", HEADER, [])
    refused(train(*SMALL, *TABLE), "table.csv has a header but no rows")
    Path("table.csv").write_text("")
    refused(train(*SMALL, *TABLE), "table.csv is empty")
    write_csv("texts.csv", ("text", "label"), [])
    refused(train(*SMALL, *TEXTS), "texts.csv has a header but no rows")


def test_dat_04_empty_folders_name_the_folder(train: Callable, workspace: Path) -> None:
    refused(train(*SMALL, *PICTURES), f"There is no folder {Path('pictures').absolute()}")
    Path("pictures").mkdir()
    refused(train(*SMALL, *PICTURES), str(Path("pictures").absolute()), "found 0 classes", "train/CLASS/*.jpg")
    for name in ("ant", "bee"):
        (Path("pictures") / name).mkdir()
        (Path("pictures") / name / "notes.txt").touch()
    refused(train(*SMALL, *PICTURES), str(Path("pictures").absolute()), "found 0 classes")


@pytest.mark.parametrize("split", ["val", "test"])
def test_dat_04_empty_val_and_test_are_refused_unless_asked_for(train: Callable, workspace: Path, split: str) -> None:
    write_table("table.csv", 20)
    write_csv("none.csv", HEADER, [])
    source = "TableData (table.csv)"
    refused(train(*SMALL, *TABLE, f"data.{split}_frac=0.01"), f"The {split} split of {source} is empty")
    refused(train(*SMALL, *TABLE, f"data.{split}_path=none.csv"), f"The {split} split", "is empty")
    for name in ("train", "val", "test"):
        counts = {"ant": 4, "bee": 4} if name != split else {}
        write_pictures(Path("pictures") / name, counts)
        (Path("pictures") / name).mkdir(exist_ok=True)
    refused(train(*SMALL, *PICTURES), f"The {split} split of ImageFolder (pictures) is empty")


def test_dat_04_train_without_rows_is_refused(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", HEADER, table_rows(2))
    refused(train(*SMALL, *TABLE, "data.val_frac=0.4", "data.test_frac=0.5"), "The train split", "is empty")
    shares = ("data.val_frac=0.5", "data.test_frac=0.5")
    for arguments in (TABLE, TEXTS, PICTURES):
        result = train(*SMALL, *arguments, *shares)
        assert result.exit_code == 1
        assert "`data.val_frac` and `data.test_frac` together must be below 1" in result.output, result.output


@pytest.mark.parametrize("kind", ["table", "pictures", "texts"])
def test_dat_04_no_validation_on_request_tests_the_last_checkpoint(train: Callable, workspace: Path, kind: str) -> None:
    write_table("table.csv", 40)
    write_csv("texts.csv", ("text", "label"), text_rows(40))
    write_pictures("pictures", {"ant": 12, "bee": 12})
    arguments = {"table": TABLE, "pictures": PICTURES, "texts": TEXTS}[kind]
    result = train(*SMALL, *arguments, "data.val_frac=0", "callbacks=early_stopping")
    assert result.exit_code == 0, result.output
    assert result.output.count("There is no validation split: `val/loss` does not exist") == 1
    assert [path.name for path in result.folder.rglob("*.ckpt")] == ["last.ckpt"]
    tested = {name: value for name, value in result.metrics.items() if name.startswith("test/")}
    again = evaluate_run(result.folder / "checkpoints" / "last.ckpt")
    assert again == pytest.approx(tested, abs=1e-6)


# ---- DAT-05: fewer rows than a batch ---------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_dat_05_fewer_rows_than_a_batch_still_train(train: Callable, workspace: Path, accumulate: int) -> None:
    write_table("table.csv", 16)
    result = train(
        *SMALL, *TABLE, "data.batch_size=32", "trainer.max_epochs=3", f"engine.accumulate_batches={accumulate}"
    )
    assert result.exit_code == 0, result.output
    saved = torch.load(result.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3  # one short batch an epoch, one step each
    assert result.metrics["train/loss"] < 2


# ---- DAT-06: a last batch of one row and BatchNorm -------------------------------------------------------------

NORMED = """
import torch

class Normed(torch.nn.Module):
    def __init__(self, num_features=2, num_targets=1):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(num_features)
        self.head = torch.nn.Linear(num_features, num_targets)

    def forward(self, features):
        return self.head(self.norm(features))

class NormedImages(Normed):
    def __init__(self, num_classes, in_channels):
        super().__init__(in_channels, num_classes)

    def forward(self, image):
        return self.head(self.norm(image.mean(dim=(2, 3))))
"""


@pytest.fixture
def normed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with two networks that have BatchNorm."""
    (workspace / "field_normed.py").write_text(NORMED)
    monkeypatch.syspath_prepend(str(workspace))
    return "field_normed"


def test_dat_06_last_row_is_left_out_of_training_only(train: Callable, workspace: Path, normed: str) -> None:
    rows = table_rows(33 + 17 + 9)
    for name, part in (("table", rows[:33]), ("val", rows[33:50]), ("test", rows[50:])):
        write_csv(f"{name}.csv", HEADER, part)
    arguments = [argument for argument in TABLE if not argument.startswith("model.")]
    arguments += ["data.val_path=val.csv", "data.test_path=test.csv", f"model.net._target_={normed}.Normed"]
    result = train(*SMALL, *arguments, "data.batch_size=8", "trainer.max_epochs=2")
    assert result.exit_code == 0, result.output
    assert result.output.count("The last 1 training sample(s) of each epoch are left out") == 1
    saved = torch.load(result.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2 * 4  # 33 = 4 x 8 + 1
    assert len(predict_file(result.folder, Path("test.csv"))) == 9
    predicted = predict_file(result.folder, Path("test.csv"))["prediction"].to_list()
    target = [row[-1] for row in rows[50:]]
    # Over all 9 rows, the last of them alone in its batch
    assert result.metrics["test/mae"] == pytest.approx(np.abs(np.subtract(predicted, target)).mean(), abs=1e-5)
    whole = train(*SMALL, *arguments, "data.batch_size=11")  # 33 = 3 x 11: nothing is left out
    assert "left out" not in whole.output


def test_dat_06_images_with_one_left_over(train: Callable, workspace: Path, normed: str) -> None:
    for split, counts in (("train", {"ant": 17, "bee": 16}), ("val", {"ant": 5, "bee": 4}), ("test", {"ant": 9})):
        write_pictures(Path("pictures") / split, counts)
    result = train(*SMALL, *PICTURES, f"model.net._target_={normed}.NormedImages", "~model.net.hidden_dims")
    assert result.exit_code == 0, result.output
    assert result.output.count("left out") == 1


def test_dat_06_batches_of_one_are_refused_with_batch_norm(train: Callable, workspace: Path, normed: str) -> None:
    write_table("table.csv", 20)
    arguments = [argument for argument in TABLE if not argument.startswith("model.")]
    result = train(*SMALL, *arguments, f"model.net._target_={normed}.Normed", "data.batch_size=1")
    assert result.exit_code == 1
    assert "ConfigError: `data.batch_size` is 1, but `model.net` has BatchNorm" in result.output
    assert not list(result.folder.rglob("*.ckpt"))
    assert train(*SMALL, *TABLE, "data.batch_size=1").exit_code == 0  # no BatchNorm, no problem


# ---- DAT-08: what was fitted stays with the run ----------------------------------------------------------------


def test_dat_08_table_predicts_without_the_training_data(train: Callable, workspace: Path) -> None:
    rows = [[*row[:2], ("red", "blue")[index % 2], row[2]] for index, row in enumerate(table_rows(60))]
    header = ("x1", "x2", "colour", "y")
    write_csv("table.csv", header, rows[:45])
    write_csv("test.csv", header, rows[45:])
    result = train(*SMALL, *TABLE, "data.test_path=test.csv")
    assert result.exit_code == 0, result.output
    for name in ("table.csv", "test.csv"):
        Path(name).unlink()
    # Other rows before them, and one colour only: a scaler fitted again would give other values
    write_csv("new.csv", header[:3], [[100.0, 100.0, "blue"], *(row[:3] for row in rows[45:])])
    predicted = predict_file(result.folder, Path("new.csv"))
    errors = np.subtract(predicted["prediction"].to_list()[1:], [row[3] for row in rows[45:]])
    assert result.metrics["test/mse"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert predicted["id"].to_list() == [str(number) for number in range(1, 17)]


def test_dat_08_texts_predict_without_the_training_data(train: Callable, workspace: Path) -> None:
    rows = text_rows(60)
    write_csv("texts.csv", ("text", "label"), rows[:45])
    write_csv("test.csv", ("text", "label"), rows[45:])
    result = train(*SMALL, *TEXTS, "data.test_path=test.csv")
    assert result.exit_code == 0, result.output
    for name in ("texts.csv", "test.csv"):
        Path(name).unlink()
    write_csv("new.csv", ("text",), [["ω new signs 漢字"], *([text] for text, _ in rows[45:])])
    predicted = predict_file(result.folder, Path("new.csv"))
    assert set(predicted["prediction"]) <= {"down", "up"}
    right = [name == label for name, (_, label) in zip(predicted["prediction"][1:], rows[45:], strict=True)]
    assert result.metrics["test/accuracy"] == pytest.approx(np.mean(right), abs=1e-6)
    log_likelihood = [
        math.log(p if name == label else 1 - p)
        for name, p, (_, label) in zip(
            predicted["prediction"][1:], predicted["probability"][1:], rows[45:], strict=True
        )
    ]
    assert result.metrics["test/loss"] == pytest.approx(-np.mean(log_likelihood), rel=1e-5)


def test_dat_08_pictures_predict_without_the_training_data(train: Callable, workspace: Path) -> None:
    for split, counts in (("train", {"ant": 12, "bee": 12}), ("val", {"ant": 2}), ("test", {"ant": 5, "bee": 3})):
        write_pictures(Path("pictures") / split, counts)
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 0, result.output
    (Path("pictures") / "test").rename("new")
    for path in sorted(Path("pictures").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    Path("pictures").rmdir()
    predicted = predict_file(result.folder, Path("new"))
    labels = [Path(name).parent.name for name in predicted["id"]]
    assert sorted(labels) == ["ant"] * 5 + ["bee"] * 3
    likelihood = [
        p if name == label else 1 - p
        for name, p, label in zip(predicted["prediction"], predicted["probability"], labels, strict=True)
    ]
    assert result.metrics["test/loss"] == pytest.approx(-np.mean(np.log(likelihood)), rel=1e-5)
    alone = predict_file(result.folder, Path(predicted["id"][3]))
    assert alone["probability"][0] == pytest.approx(predicted["probability"][3], abs=1e-6)


def test_dat_08_evaluation_after_the_training_rows_changed_is_refused(train: Callable, workspace: Path) -> None:
    rows = table_rows(60)
    write_csv("table.csv", HEADER, rows[:45])
    write_csv("test.csv", HEADER, rows[45:])
    texts = text_rows(60)
    write_csv("texts.csv", ("text", "label"), texts[:45])
    write_csv("test_texts.csv", ("text", "label"), texts[45:])
    table = train(*SMALL, *TABLE, "data.test_path=test.csv")
    text = train(*SMALL, *TEXTS, "data.test_path=test_texts.csv")
    # Other test rows are fine: nothing is fitted on them
    write_csv("test.csv", HEADER, rows[50:])
    assert evaluate_run(table.folder).keys() == {"test/loss", "test/mse", "test/mae", "test/r2"}
    # Fitted again, the scale and the numbers of the characters would be others than the network learned with
    write_csv("table.csv", HEADER, [[10 * a, b, y] for a, b, y in rows[:45]])
    with pytest.raises(DataError, match=r"The training rows of TableData \(table.csv\) are not .* means, stds changed"):
        evaluate_run(table.folder)
    write_csv(
        "texts.csv", ("text", "label"), [[f"{row} {text}", label] for row, (text, label) in enumerate(texts[:45])]
    )
    with pytest.raises(DataError, match="characters changed"):
        evaluate_run(text.folder)


# ---- DAT-09: labels outside the classes ------------------------------------------------------------------------


def test_dat_09_label_outside_the_classes_is_named_by_file_and_row(train: Callable, workspace: Path) -> None:
    rows = [[text, str(index % 3)] for index, (text, _) in enumerate(text_rows(60))]
    rows[41][1] = "7"
    write_csv("texts.csv", ("text", "label"), rows)
    refused(train(*SMALL, *TEXTS, "data.classes=[0,1,2]"), "texts.csv", "label '7' in row 42", "data.classes: 0, 1, 2")
    result = train(*SMALL, *TEXTS, "model.num_classes=3")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "'7'" in result.output or "`model.num_classes` is 3, but the data has 4" in result.output


@pytest.mark.parametrize("label", ["", " "])
def test_dat_09_empty_label_is_named_by_row(train: Callable, workspace: Path, label: str) -> None:
    rows = text_rows(40)
    rows[17][1] = label
    write_csv("texts.csv", ("text", "label"), rows)
    refused(train(*SMALL, *TEXTS), "column `label` is empty in 1 row(s) (row 18)")


@pytest.mark.parametrize("split", ["val", "test"])
def test_dat_09_label_of_one_split_only_is_named_with_its_count(train: Callable, workspace: Path, split: str) -> None:
    rows = text_rows(40)
    write_csv("texts.csv", ("text", "label"), rows)
    write_csv("other.csv", ("text", "label"), [*rows[:8], ["a new text", "sideways"], ["another", "sideways"]])
    result = train(*SMALL, *TEXTS, f"data.{split}_path=other.csv")
    refused(result, f"other.csv: the {split} rows", "'sideways' (2 rows)", "Training labels: down, up")


def test_dat_09_labels_that_do_not_start_at_zero_are_names(train: Callable, workspace: Path) -> None:
    rows = [[f"{text} {('a', 'b', 'c')[index % 3]}", index % 3 + 1] for index, (text, _) in enumerate(text_rows(60))]
    write_csv("texts.csv", ("text", "label"), rows)
    result = train(*SMALL, *TEXTS)
    assert result.exit_code == 0, result.output
    assert load_checkpoint(result.folder).data_state["facts"]["class_names"] == ["1", "2", "3"]
    write_csv("new.csv", ("text",), [[text] for text, _ in rows])
    assert set(predict_file(result.folder, Path("new.csv"))["prediction"]) <= {"1", "2", "3"}


# ---- DAT-10: everything that carries data can go to a spawned process ------------------------------------------


def summarise(content: bytes) -> list[float]:
    """Sums of the batches of two epochs, and the loss of the last of them: what another process works out."""
    import torch

    torch.set_num_threads(1)
    data, task, loader = pickle.loads(content)
    sums = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        for index, batch in enumerate(loader):
            generator = torch.Generator().manual_seed(100 * epoch + index)
            ready = data.transform_batch(batch, generator)
            weights = torch.arange(len(batch["index"]))
            sums.append(float((batch["index"] * weights).sum()))
            sums.append(float(ready[task.input_key].double().sum()))
    with torch.no_grad():
        return [*sums, float(task.compute_loss(ready)[0])]


AUGMENTED = (
    "experiment=vision_fashion_mnist_mlp",
    "data=digits",
    "model.net.hidden_dims=[8]",
    "+data.augment.flip._target_=leyden.data.batch_transforms.RandomFlip",
    "+data.augment.crop._target_=leyden.data.batch_transforms.RandomCrop",
    "+data.augment.crop.padding=1",
    "+data.augment.noise._target_=leyden.data.batch_transforms.GaussianNoise",
    "+data.augment.noise.std=0.1",
    "+data.augment.cutout._target_=leyden.data.batch_transforms.Cutout",
    "+data.augment.cutout.size=2",
    "+data.augment.affine._target_=leyden.data.batch_transforms.RandomAffine",
    "+data.augment.affine.degrees=5.0",
    "+data.augment.affine.translate_frac=0.1",
    "+data.augment.affine.scale_frac=0.1",
    "+data.augment.affine.shear_degrees=0.0",
)


def test_dat_10_data_and_tasks_work_in_another_process(train: Callable, workspace: Path) -> None:
    # There are no worker processes by design, but whatever a user sends to one must arrive
    contents = []
    recipes = (("experiment=regression",), AUGMENTED, ("experiment=nlp", "model.net.num_buckets=512"))
    for arguments in recipes:
        result = train("debug=fast", "logger=null", *arguments)
        assert result.exit_code == 0, result.output
        task, data = restore(load_checkpoint(result.folder))
        data.setup("fit")
        data.splits["train"] = {name: tensor[:150] for name, tensor in data.splits["train"].items()}
        data.splits["train"]["index"] = torch.arange(150)
        contents.append(pickle.dumps((data, task, data.train_dataloader())))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(summarise, contents)
    assert found == [summarise(content) for content in contents]


# ---- DAT-11: augmentation ---------------------------------------------------------------------------------------

RECORDER = """
import hashlib
seen = []

class Recorder:
    def __init__(self, strength):
        self.strength = strength

    def __call__(self, image, generator):
        import torch
        noise = torch.rand(image.shape[0], 1, 1, 1, generator=generator)
        seen.append(noise.flatten().tolist())
        return image + self.strength * noise
"""


def test_dat_11_augmentation_differs_by_batch_and_epoch_and_repeats_by_seed(
    train: Callable, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    (workspace / "field_recorder.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(workspace))
    recorder = importlib.import_module("field_recorder")
    write_pictures("pictures", {"ant": 15, "bee": 15})
    augment = ("+data.augment.recorder._target_=field_recorder.Recorder", "+data.augment.recorder.strength=0.1")

    def draws(*arguments: str) -> tuple[list[list[float]], dict[str, float]]:
        recorder.seen.clear()
        result = train(*SMALL, *PICTURES, *augment, "trainer.max_epochs=2", *arguments)
        assert result.exit_code == 0, result.output
        return list(recorder.seen), result.metrics

    first, metrics = draws()
    assert len(first) == 2 * 3  # 30 pictures, 6 for the test and 4 for validation: 20 in batches of 8
    values = [value for batch in first for value in batch]
    assert len(set(values)) == len(values) == 2 * 20  # all different: within a batch, by batch and by epoch
    # Sanity steps and further validation draw nothing
    assert draws("trainer.num_sanity_val_steps=2") == (first, metrics)
    assert draws("seed=1")[0] != first


# ---- DAT-12: shared memory, and rare classes --------------------------------------------------------------------


def test_dat_12_rare_class_shows_beside_accuracy(train: Callable, workspace: Path) -> None:
    def rows(count: int, prefix: str) -> list[list[str]]:
        return [[f"{prefix} {index}", "rare" if index % 100 == 99 else "usual"] for index in range(count)]

    write_csv("texts.csv", ("text", "label"), rows(200, "train"))
    write_csv("test.csv", ("text", "label"), rows(100, "test"))
    result = train(*SMALL, *TEXTS, "data.test_path=test.csv", "trainer.max_epochs=2")
    assert result.exit_code == 0, result.output
    # Always 'usual': right for 99 of 100; F1 of 'usual' is 2 x 99 / (2 x 99 + 1), of 'rare' 0
    assert result.metrics["test/accuracy"] == pytest.approx(0.99, abs=1e-6)
    assert result.metrics["test/macro_f1"] == pytest.approx(198 / 199 / 2, abs=1e-6)
    table = result.output[result.output.index("Test") :]
    assert "accuracy" in table
    assert "macro_f1" in table
    assert "always 'usual'" in table


def test_dat_12_worker_processes_only_where_asked_for_and_none_is_left(train: Callable, workspace: Path) -> None:
    write_csv("texts.csv", ("text", "label"), text_rows(60))
    plain = train(*SMALL, *TEXTS, "trainer.max_epochs=1")
    assert "Batches from memory" in plain.output
    workers = train(*SMALL, *TEXTS, "trainer.max_epochs=1", "data.residency=workers", "data.num_workers=2")
    assert workers.exit_code == 0, workers.output
    assert "Batches from worker processes" in workers.output
    assert multiprocessing.active_children() == []
    assert workers.metrics == plain.metrics
