"""Compiled programs are kept for the next start, in a folder that fits the machine."""

import contextlib
import copy
import pathlib
import threading
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fiddlex.cluster import program_cache
from fiddlex.cluster.program_cache import MOST_BYTES, Hits, counting_hits, keep_programs
from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.train import trainer
from fiddlex.train.run.workdir import read_config
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer

FIELDS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    """Lets a test choose where programs are kept; the other tests share a folder."""
    before = {field: getattr(jax.config, field) for field in FIELDS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    for field, value in before.items():
        jax.config.update(field, value)
    compilation_cache.reset_cache()


def was_kept(config: Config, folder: pathlib.Path | str) -> bool:
    config = copy.deepcopy(config)
    config.train.compilation_cache = str(folder)
    made = Trainer(config)
    jax.clear_caches()
    compilation = made.compile()
    assert compilation is not None
    assert compilation.seconds > 0
    assert made.compile() is None
    assert made.record(made.dispatch())["loss"] == pytest.approx(5.43, abs=0.01)
    return compilation.was_kept


def steps_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*-cache") if "step" in path.name]


@pytest.mark.long
def test_a_program_is_compiled_once(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    assert not was_kept(tiny_config, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # of this processor
    assert steps_in(tmp_path)
    assert was_kept(tiny_config, tmp_path)
    assert jax.config.jax_compilation_cache_max_size == MOST_BYTES
    assert not was_kept(tiny_config, "")
    for path in steps_in(tmp_path):  # as after a kill while jax wrote it
        path.write_bytes(path.read_bytes()[:1000])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not was_kept(tiny_config, tmp_path)
    assert any("Error reading persistent compilation cache entry" in str(each.message) for each in told)


def test_a_program_that_was_not_written_whole_is_removed(tmp_path: pathlib.Path) -> None:
    keep_programs(str(tmp_path))
    jax.jit(lambda x: x * 19)(2)
    folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
    (whole,) = folder.glob("*-cache")
    (folder / "killed-cache").write_bytes(whole.read_bytes()[:100])  # jax had yet to write killed-atime
    for name in ("power-cut-cache", "power-cut-atime"):
        (folder / name).touch()
    keep_programs("")
    keep_programs(str(tmp_path))
    jax.jit(lambda x: x * 23)(2)
    programs = {path.name for path in folder.glob("*-cache")}
    assert len(programs) == 2
    assert whole.name in programs
    assert not programs & {"killed-cache", "power-cut-cache"}


@pytest.mark.parametrize("where", ["before the step", "in another thread"])
def test_programs_beside_the_step_do_not_count(
    where: str, tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, found = jnp.arange(3), counting_hits

    def compile_another() -> None:
        jax.clear_caches()
        with found() as hits:
            jax.jit(lambda x: x * 17)(number)
        seen.append(hits.number)

    @contextlib.contextmanager
    def beside() -> Iterator[Hits]:
        with found() as hits:
            thread = threading.Thread(target=compile_another)
            thread.start()
            thread.join()
            yield hits

    def lower(self: Program) -> jax.stages.Lowered:
        compile_another()
        return original(self)

    seen: list[int] = []
    original = Program.lower
    keep_programs(str(tmp_path))
    compile_another()
    if where == "before the step":
        monkeypatch.setattr(Program, "lower", lower)
    else:
        monkeypatch.setattr(trainer, "counting_hits", beside)
    assert not was_kept(tiny_config, tmp_path)
    assert seen == [0, 1]


def test_the_folder_is_one_of_the_user_unless_jax_has_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_programs("auto")
    (folder,) = (tmp_path / "fiddlex" / "programs").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    monkeypatch.setattr(program_cache, "_processor", lambda: "another")
    keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir == str(folder)  # as if JAX_COMPILATION_CACHE_DIR had named it
    keep_programs("")
    assert jax.config.jax_compilation_cache_dir is None
    keep_programs(str(tmp_path))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "another")


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"train.compilation_cache=.*file cannot be written: Not a directory. Name"):
        keep_programs(str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir is None


def test_no_workdir_names_a_folder_of_machine_code(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    tiny_config.train.compilation_cache = str(tmp_path / "of-somebody-else")
    (tmp_path / "config.json").write_text(tiny_config.to_json())
    assert "of-somebody-else" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path).train.compilation_cache == "auto"
