"""Randomness inside a step depends on its position only."""

import itertools

import torch

from leyden.engine.rng import seed_step


def draw(*position: int) -> torch.Tensor:
    seed_step(*position)
    return torch.rand(4)


def test_a_position_always_draws_the_same() -> None:
    expected = draw(3, 7, 1, 0)
    torch.rand(5)
    draw(3, 8, 1, 0)
    assert draw(3, 7, 1, 0).equal(expected)


def test_seed_step_micro_batch_and_rank_each_matter() -> None:
    draws = {tuple(draw(*position).tolist()) for position in itertools.product(range(3), repeat=4)}
    assert len(draws) == 81  # 3**4 positions


def test_dropout_follows_the_position() -> None:
    dropout = torch.nn.Dropout(0.5)
    seed_step(0, 5)
    first = dropout(torch.ones(64))
    seed_step(0, 6)
    assert not dropout(torch.ones(64)).equal(first)
    seed_step(0, 5)
    assert dropout(torch.ones(64)).equal(first)
