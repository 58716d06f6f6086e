"""The `leyden` command, and the way to `field_data`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent / "field"))  # for field_data, which the tests there share


@pytest.fixture
def leyden(workspace: Path) -> Callable[..., Result]:
    """Runs `leyden ARGUMENTS` in this process in `workspace`."""

    def run(*arguments: object) -> Result:
        from leyden.cli import app

        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run
