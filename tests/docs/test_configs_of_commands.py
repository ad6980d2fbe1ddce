"""Commands in the docs that name a config of fiddlex: it is valid with the overrides that they give."""

import re

import pytest

from fiddlex.config.files import config_names, load_config
from fiddlex.config.overrides import is_field, override
from tests.programs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = {line.strip() for page in PAGES for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()}
COMMANDS = sorted(
    line for line in LINES if re.search(r"(train|compile|benchmark|plan|what_if)(\.py)? .*--config=", line)
)


def spec_of(line: str) -> str:
    """What `--config` names, as in `gpt3:7.5b`."""
    return re.findall(r"--config=([^\s`]+)", line)[0].removeprefix("configs/").replace(".py", "", 1)


def is_ours(line: str) -> bool:
    name = spec_of(line).partition(":")[0]
    return name in config_names() and name != "huggingface" and "=…" not in line  # that one needs a folder


def overrides(line: str) -> list[str]:
    found = re.findall(r"--config\.([\w.]+)=(?:'([^']*)'|([^\s'`;|)]*))", line)
    return [f"{path}={quoted or plain}" for path, quoted, plain in found if is_field(path)]


@pytest.mark.parametrize("line", [*filter(is_ours, COMMANDS)])
def test_the_config_takes_the_overrides(line: str) -> None:
    override(load_config(spec_of(line)), *overrides(line)).validate()
