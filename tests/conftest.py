"""Eight fake CPU devices for every test, and small configs and data that tests share."""

import os
import pathlib

# LLVM's optimizations change how fast the tests' small programs run, which is no matter, and treble their compile time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("shared cores", deadline=None)  # times vary with the load of the machine
hypothesis.settings.load_profile("shared cores")
jax.config.update("jax_num_cpu_devices", 8)
# Many tests run the same programs; between the workers, and from one run of the tests to the next, they share them.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

from fiddlex.config import Config  # noqa: E402  # after the devices are set


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
