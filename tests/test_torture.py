"""A run that is killed at random moments, on a disk that fails too, makes what an undisturbed run makes."""

import shutil
import subprocess
import sys

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("semantics", "disk"), [("2bw", "well"), ("sync", "full"), ("2bw", "readonly"), ("sync", "slow")]
)
def test_nothing_is_lost(semantics: str, disk: str) -> None:
    if disk != "well" and not (sys.platform == "linux" and shutil.which("cc")):
        pytest.skip("a disk that fails takes Linux and a C compiler")
    flags = [f"--semantics={semantics}", f"--disk={disk}", "--kills=4", "--steps=150", "--every_s=4"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.torture", *flags], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = done.stdout.splitlines()[2:]
    assert row.startswith(f"| {semantics} | {disk} | 4 |")
    assert row.endswith("| nothing |")
