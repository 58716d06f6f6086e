"""docs/add-a-task.md, followed to the letter, gives a working fourth task."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "add-a-task.md"
BLOCK = re.compile(r"```\w+ file=(\S+)\n(.*?)```", re.S)


@pytest.fixture
def followed(workspace: Path) -> Iterator[Path]:
    for path, content in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(content, encoding="utf-8")
    yield workspace
    for name in [name for name in sys.modules if name.split(".")[0] == "denoising"]:
        del sys.modules[name]
    if str(workspace) in sys.path:
        sys.path.remove(str(workspace))


def test_the_page_gives_a_working_task(followed: Path, train: Callable) -> None:
    result = train("experiment=denoising")
    assert result.exit_code == 0, result.output
    # Noise of deviation 0.3 alone is 10 log10(1 / 0.09) = 10.5 dB; a network that learned nothing keeps it.
    assert result.metrics["test/psnr"] > 14
    assert "the noisy picture" in result.output


def test_its_keys_are_checked(followed: Path, train: Callable) -> None:
    result = train("experiment=denoising", "data.nois_std=1")
    assert result.exit_code == 1
    assert "`data.noise_std`" in result.output
    result = train("experiment=denoising", "data.noise_std=0")
    assert result.exit_code == 1
    assert "`data.noise_std` must be greater than 0" in result.output


def test_help_lists_it(followed: Path, train: Callable) -> None:
    result = train("--help")
    assert result.exit_code == 0
    assert re.search(r"denoising\s+Digits without their noise", result.output)
