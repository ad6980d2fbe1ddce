"""Eight fake CPU devices for every test, tiers of tests, and small configs and data that tests share."""

import gc
import importlib.metadata
import os
import pathlib
import signal
from collections.abc import Iterator

# The time to compile matters here, the time to run does not. LLVM's optimizations triple the time to compile, and XLA's
# newer way of emitting code for fusions doubles it; jax 0.10 can do without, and 0.11.2 has no other. Tests that run on
# a GPU (experiments/gpu.py) are to run the code that users run.
if os.environ.get("JAX_PLATFORMS", "") in ("", "cpu"):
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
        + ["--xla_cpu_use_fusion_emitters=false"]
        * ([int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]] < [0, 11])
    )
# Many tests run the same programs; the workers, the processes that tests start, and the next run of the tests share
# what was compiled.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# Processes that tests start import this very tree, whatever fiddlex is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

from fiddlex.config import Config  # noqa: E402  # after the devices are set

# Tracing makes many objects with few cycles among them; collecting at the default rate took a twentieth of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

# Examples of a property that sets no number of its own; without deadlines, since times vary with the machine's load.
hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("full", max_examples=200, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.option.markexpr == "full" else "default")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker("full")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Some 60 kB of real text: the source of a module of the standard library."""
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(pathlib.Path(__import__("argparse").__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture
def tiny_config(text_file: pathlib.Path) -> Config:
    """A model that compiles in seconds; its vocabulary does not divide by the mesh, so that padding is at work."""
    config = Config()
    config.model.num_layers = 2
    config.model.hidden_size = 32
    config.model.seq_len = 16
    config.model.vocab_size = 257
    config.data.source = f"text:{text_file}"
    config.data.global_batch_size = 16
    config.data.eval_batches = 4
    config.train.num_steps = 5
    config.train.log_every = 1
    return config


@pytest.fixture
def limited() -> Iterator[None]:
    """Ends a test that waits for a pipe; to open a pipe that nobody writes to takes for ever."""

    def end(*ignored: object) -> None:
        raise TimeoutError("the test waits for something that does not come")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def config_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A config file with the default config, for programs whose flags set the fields."""
    path = tmp_path / "plain.py"
    path.write_text("from fiddlex.config import Config\n\n\ndef get_config():\n    return Config()\n")
    return path
