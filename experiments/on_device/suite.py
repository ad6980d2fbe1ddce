"""The stage `tests`: tests of the repository that a GPU at hand makes possible, a file at a time."""

import functools
import pathlib
import sys
import tempfile
import xml.etree.ElementTree
from typing import NamedTuple

from experiments.on_device.programs import last, run
from experiments.on_device.study import Record, Study
from fiddlex.errors import FiddlexError


class Chosen(NamedTuple):
    """Some tests of a file.

    Attributes:
      name: what tables call them.
      path: the file.
      choice: pytest's expression that chooses them; empty: all.
      on_device: whether they run on the device at hand; otherwise they only compile for GPUs.
    """

    name: str
    path: str
    choice: str = ""
    on_device: bool = False


# Layouts of one device train on it and are compared with tests/reference.py, to a relative difference of 1e-5. The
# others read programs that XLA has compiled for GPUs, which takes jax's CUDA plugin and no GPU.
TESTS = (
    Chosen("training against the reference", "tests/train/test_layouts.py", "1x1x1", on_device=True),
    Chosen("hops beside work", "tests/xla/test_overlap.py", "on_gpus"),
    Chosen("bytes between hosts", "tests/xla/test_slow_links.py", "compiled_step and h100"),
    Chosen("predicted memory", "tests/costs/test_memory_model.py", "on_gpus"),
)


def run_suite(study: Study, device: str, tests: tuple[Chosen, ...] = TESTS) -> None:
    """Runs the tests; each file is a part of the study."""
    for each in tests:
        inputs = {"path": each.path, "choice": each.choice}
        study.measure("tests", each.name, inputs, functools.partial(run_tests, each, device))


def run_tests(tests: Chosen, device: str) -> Record:
    """Runs the tests of a file; those that only compile run without the device.

    Returns:
      The numbers of tests that `passed`, `failed` and were `skipped`; where one failed, `error` names it.

    Raises:
      FiddlexError: when pytest ends without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "junit.xml"
        # Without pytest-xdist, and without errors for warnings, which differ with the versions of a machine.
        line = [sys.executable, "-m", "pytest", "-o", "addopts=", "-W", "default", f"--junit-xml={path}", tests.path]
        line += ["-k", tests.choice] * bool(tests.choice)
        if tests.on_device:
            # Products of float32 are otherwise of TensorFloat-32 on GPUs, which is too coarse for the tolerance.
            done = run(line, device=device, JAX_DEFAULT_MATMUL_PRECISION="highest")
        else:
            done = run(line, device="cpu")
        if not path.exists():
            raise FiddlexError(f"pytest ended with status {done.returncode}. The last that it wrote:\n{last(done)}")
        return read_junit(path.read_text(encoding="utf-8"))


def read_junit(text: str) -> Record:
    """What pytest's JUnit XML says of tests."""
    cases = list(xml.etree.ElementTree.fromstring(text).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    result: Record = {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "reasons": sorted({case.find("skipped").get("message", "") for case in skipped}),  # type: ignore[union-attr]
    }
    if failed:
        result["error"] = f"failed: {', '.join(case.get('name', '') for case in failed)}"
    elif not cases:
        result["error"] = "no test was chosen"
    return result
