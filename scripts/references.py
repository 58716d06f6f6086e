"""Measures the scikit-learn results that conf/data shows beside a run, on the very rows of the splits.

Fits on the training rows (validation rows are not used) and scores the test rows. Run: python scripts/references.py
"""

from __future__ import annotations

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge, SGDClassifier
from sklearn.metrics import accuracy_score, f1_score, r2_score
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC

from leyden.nlp.data import LanguageNames
from leyden.regression.data import AutoMpg, Diabetes, TableData
from leyden.vision.data import Digits


def score_table(data: TableData) -> None:
    """R2 of ridge regression and gradient boosting."""
    data.setup()
    train, test = ({k: v.numpy() for k, v in data.splits[name].items()} for name in ("train", "test"))
    for model in (Ridge(1.0), HistGradientBoostingRegressor(random_state=0)):
        model.fit(train["features"], train["target"][:, 0])
        score = r2_score(test["target"][:, 0], model.predict(test["features"]))
        print(f"{data.describe()}: {type(model).__name__} r2 {score:.4f}")


def score_digits() -> None:
    """Accuracy of an SVM with RBF kernel on the pixels 0 .. 16."""
    data = Digits()
    data.setup()
    rows = {
        name: (split["image"].flatten(1).numpy() * (16 / 255), split["label"].numpy())
        for name, split in data.splits.items()
    }
    images, labels = (np.concatenate(parts) for parts in zip(rows["train"], rows["val"], strict=True))
    for name, (x, y) in {"train": rows["train"], "train and val": (images, labels)}.items():
        model = SVC(gamma=0.001, C=10).fit(x, y)
        print(f"Digits: SVM (RBF) fitted on {name}: accuracy {model.score(*rows['test']):.4f}")


def score_languages() -> None:
    """Accuracy and macro-F1 of tf-idf of character 1- to 4-grams with a linear classifier (alpha by validation)."""
    splits, _ = LanguageNames().load_texts()
    model = make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), sublinear_tf=True, lowercase=False),
        SGDClassifier(loss="log_loss", alpha=3e-6, random_state=0),
    )
    model.fit(*splits["train"])
    for name in ("val", "test"):
        predicted = model.predict(splits[name][0])
        accuracy = accuracy_score(splits[name][1], predicted)
        macro_f1 = f1_score(splits[name][1], predicted, average="macro")
        print(f"LanguageNames: n-gram tf-idf + linear, {name}: accuracy {accuracy:.4f}, macro-F1 {macro_f1:.4f}")


if __name__ == "__main__":
    score_table(AutoMpg())
    score_table(Diabetes())
    score_digits()
    score_languages()
