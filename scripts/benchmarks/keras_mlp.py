"""Keras 3 on TensorFlow: the same MLP from arrays in memory, with its accuracy.

Needs numpy, keras and tensorflow only, so that it can run in an environment of its own.
Run: python -m benchmarks.keras_mlp ARRAYS OUT --steps-per-execution N --dtype float32|uint8 [--epochs N]
"""

from __future__ import annotations

import os

import numpy as np

from benchmarks.arguments import array_parser
from benchmarks.clock import EpochClock
from benchmarks.works import WARMUP_EPOCHS

os.environ["KERAS_BACKEND"] = "tensorflow"


def main() -> None:
    """Measures `fit` and writes the result."""
    parser = array_parser(__doc__)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "uint8"), default="float32")
    args = parser.parse_args()

    import keras
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    with np.load(args.arrays) as found:
        image, label, mean, std = (found[name] for name in ("image", "label", "mean", "std"))
    if args.limit_batches:
        image, label = (array[: args.limit_batches * args.batch_size] for array in (image, label))
    scale, shift = 1 / (255 * float(std)), -float(mean) / float(std)
    layers = [keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    if args.dtype == "float32":  # converted once, before any epoch
        image = image.astype(np.float32) * np.float32(scale) + np.float32(shift)
    else:
        layers.insert(0, keras.layers.Rescaling(scale, shift))
    model = keras.Sequential([keras.Input(image.shape[1:], dtype=args.dtype), *layers])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=args.steps_per_execution,
    )
    clock = EpochClock(WARMUP_EPOCHS)

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            clock.start_epoch()

        def on_train_end(self, logs: dict[str, float] | None = None) -> None:
            clock.finish()

    history = model.fit(
        image, label, args.batch_size, epochs=WARMUP_EPOCHS + args.epochs, verbose=0, callbacks=[Timer()]
    )
    print(history.history)
    clock.write(
        args.out,
        num_batches=-(-len(label) // args.batch_size),
        versions={"keras": keras.__version__, "tensorflow": tensorflow.__version__},
    )


if __name__ == "__main__":
    main()
