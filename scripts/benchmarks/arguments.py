"""What every contender is told; imports nothing, as Keras has an environment of its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def work_parser(description: str | None, works: Iterable[str]) -> argparse.ArgumentParser:
    """Of a contender that trains an experiment's own network."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("work", choices=works)
    _add_common(parser)
    parser.add_argument("--override", action="append", default=[], help="a further override of the experiment")
    return parser


def array_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a contender that trains a network of its own on arrays."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("arrays", help="npz with image (N, 28, 28) uint8 and label (N,), mean and std")
    _add_common(parser)
    parser.add_argument("--batch-size", type=int, default=128)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--limit-batches", type=int)
