"""Trains and tests an experiment. `python train.py --help` shows what there is."""

from leyden.entry import train

if __name__ == "__main__":
    train()
