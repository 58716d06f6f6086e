"""Networks for tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn

from leyden.nets.plan import Plan, plan_layers

Positive = Annotated[int, Ge(1)]


class Linear(nn.Module):
    """A linear model.

    Shape:
        input (B, num_features) -> output (B, num_targets).
    """

    def __init__(self, num_features: Positive, num_targets: Positive) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_targets)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.head(features)
        return output


class MLP(nn.Module):
    """Fully connected layers with GELU and dropout.

    Shape:
        input (B, num_features) -> output (B, num_targets).
    """

    def __init__(
        self,
        num_features: Positive,
        num_targets: Positive,
        hidden_dim: Positive = 64,
        num_layers: Positive = 2,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
    ) -> None:
        super().__init__()
        sizes: Sequence[int] = [num_features, *[hidden_dim] * num_layers]
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.GELU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden_dim, num_targets)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(features))
        return output

    def parallel_plan(self) -> Plan:
        """How tensor parallel training cuts it: each second layer takes up what the one before shares out."""
        layers = range(0, len(self.body), 3)  # Linear, GELU, Dropout
        return plan_layers([*((f"body.{i}", f"body.{i + 2}") for i in layers), ("head", None)])
