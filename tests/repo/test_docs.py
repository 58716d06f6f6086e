"""README and docs: paths exist, commands compose, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from leyden.cli import prove

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "outputs" / "README.md"])
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def commands(page: Path) -> list[str]:
    """The command lines in a page's console blocks, and in the headers of YAML files."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|sh|bash)\n(.*?)```", text, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def overrides(words: list[str]) -> list[str]:
    return [word for word in words if "=" in word and not word.startswith("-")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


ALL_COMMANDS = sorted({(page.name, command) for page in PAGES for command in commands(page)})


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS, ids=lambda value: value[:60])
def test_documented_commands_exist(page: str, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert words[1] in TARGETS, f"{page}: no such make target"
        arguments = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=")]
        words = ["python", "train.py", *shlex.split(arguments[0])] if arguments else []
        if words and "pytest" in command:
            return
    if words[:2] == ["leyden", "prove"]:
        assert words[2] in {command.name or command.callback.__name__ for command in prove.registered_commands}
        words = ["leyden", "train", *overrides(words)]
    if words[:2] in (["python", "train.py"], ["leyden", "train"]) and "--help" not in words:
        if "experiment=mine" in words or "experiment=denoising" in words:
            return  # made by the page itself; tests of their own follow those pages
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            words = [word for word in words if not word.startswith("resume=")]  # names a run, which is not there
            compose("train", [o.split(",")[0] for o in overrides(words)], return_hydra_config=True)
    elif words and words[0] == "leyden":
        assert words[1] in {"train", "evaluate", "predict", "doctor"}


def test_readme_is_short_and_names_existing_paths() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "make train" in text
    assert "make test" in text
    tree = re.search(r"```text\n(.*?)```", text, re.S)
    assert tree, "README has no map of the tree"
    paths = re.findall(r"^(\S+)\s{2,}", tree.group(1), re.M)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), f"README's map names {path}"


def test_readme_has_a_picture_that_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures
    assert all((ROOT / picture).stat().st_size > 5_000 for picture in pictures)


def test_nothing_unfinished_is_left() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", "TO" + "DO|FIX" + "ME|utils" + r"\.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60
