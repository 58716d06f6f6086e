"""What is trained, by whom, and which targets hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WARMUP_EPOCHS = 1


@dataclass(frozen=True)
class Target:
    """A bound on one contender's CPU time relative to another's.

    Attributes:
        text: for people.
        contender: whose time is bounded.
        against: the other contender.
        kind: whether the bound is on the quotient or on the difference (in seconds).
        at_most: the bound.
    """

    text: str
    contender: str
    against: str
    kind: Literal["ratio", "difference"]
    at_most: float


@dataclass(frozen=True)
class Work:
    """One thing to measure.

    Attributes:
        title: for people.
        overrides: the command line of Leyden; every contender trains the same network in the same way.
        contenders: name -> the ways to run it, of which the fastest counts.
        targets: what should hold.
        epochs: epochs that count; more where one is so short that several share a checkpoint.
    """

    title: str
    overrides: tuple[str, ...]
    contenders: dict[str, tuple[str, ...]]
    targets: tuple[Target, ...]
    epochs: int = 2


# What a contender is called in tables.
TITLES = {
    "floor": "matrix products alone",
    "raw": "PyTorch loop by hand",
    "leyden": "Leyden",
    "keras1": "Keras, 1 step per execution",
    "keras32": "Keras, 32 steps per execution",
    "lightning": "Lightning, per-sample loader",
    "imports": "importing torch, lightning.pytorch and torchmetrics",
}

PLAIN = ("plain",)

WORKS = {
    "mlp": Work(
        title="Fashion-MNIST, MLP 784-128-10, Adam, batch 128",
        overrides=("experiment=vision_fashion_mnist_mlp", "schedule=constant", "schedule.warmup_frac=0.0"),
        contenders={
            "floor": PLAIN,
            "raw": PLAIN,
            "leyden": PLAIN,
            "keras1": ("float32", "uint8"),
            "keras32": ("float32", "uint8"),
            "lightning": ("0 workers", "2 workers"),
        },
        targets=(
            Target("at most 1.25 times the loop by hand", "leyden", "raw", "ratio", 1.25),
            Target("faster than Keras with 32 steps per execution", "leyden", "keras32", "ratio", 1.0),
            Target("at least 6 times faster than Lightning", "leyden", "lightning", "ratio", 1 / 6),
        ),
    ),
    "cnn": Work(
        title="Fashion-MNIST, residual CNN (experiment=vision_fashion_mnist)",
        overrides=("experiment=vision_fashion_mnist",),
        contenders={"floor": PLAIN, "raw": ("contiguous", "channels_last"), "leyden": PLAIN},
        targets=(Target("at most 1.05 times the loop by hand", "leyden", "raw", "ratio", 1.05),),
    ),
    "nlp": Work(
        title="Language of short names, bag of n-grams (experiment=nlp)",
        overrides=("experiment=nlp",),
        contenders={"floor": PLAIN, "raw": PLAIN, "leyden": PLAIN},
        targets=(Target("at most 1.10 times the loop by hand", "leyden", "raw", "ratio", 1.10),),
        epochs=10,
    ),
    "startup": Work(
        title="Start-up: from the command to the first optimiser step (experiment=vision)",
        overrides=("experiment=vision",),
        contenders={"imports": PLAIN, "leyden": PLAIN},
        targets=(Target("at most 1.5 s more than the imports", "leyden", "imports", "difference", 1.5),),
    ),
}
