"""A config file for runs of several processes."""

import pathlib

import pytest


@pytest.fixture
def config_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A config file with the default config."""
    path = tmp_path / "plain.py"
    path.write_text("from fiddlex.config import Config\n\n\ndef get_config():\n    return Config()\n")
    return path
