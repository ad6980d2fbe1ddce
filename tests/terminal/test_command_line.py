import contextlib
import dataclasses
import errno
import gc
import gzip
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.files import load_config
from fiddlex.config.overrides import override
from fiddlex.errors import CheckpointError, ConfigError, DataError, FiddlexError, ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.terminal.command_line import _interrupt, _memory_advice, _status
from fiddlex.terminal.memory_advice import memory_remedies
from tests.programs import Ended, started

TRAIN = '''
"""Prints the config that it would run; --error raises what training might."""
from absl import flags
import fiddlex.terminal.command_line
from fiddlex.errors import CheckpointError

_CONFIG = fiddlex.terminal.command_line.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_ERROR = flags.DEFINE_enum("error", "", ["", "checkpoint", "bug", "memory", "internal"], "what to raise")

def main(argv):
    if _ERROR.value == "checkpoint":
        raise CheckpointError("the checkpoint is gone.")
    if _ERROR.value == "bug":
        raise ZeroDivisionError
    if _ERROR.value in ("memory", "internal"):
        import jax
        kind = "RESOURCE_EXHAUSTED" if _ERROR.value == "memory" else "INTERNAL"
        error = jax.errors.JaxRuntimeError(f"{kind}: Out of memory allocating 1 byte.")
        error.add_note("It was predicted.")
        raise error
    print(_CONFIG.value.validate().to_json())

if __name__ == "__main__":
    fiddlex.terminal.command_line.run(main)
'''
EVALUATE = '''
"""Prints the config of its imagined workdir, under the overrides."""
from absl import flags
import fiddlex.terminal.command_line
from fiddlex.config import Config, MeshConfig

fiddlex.terminal.command_line.define_overrides()
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)

def main(argv):
    saved = Config(mesh=MeshConfig(data=4, tensor=2))
    config = fiddlex.terminal.command_line.apply_overrides(saved)
    assert saved == Config(mesh=MeshConfig(data=4, tensor=2))
    print(config.to_json())

if __name__ == "__main__":
    fiddlex.terminal.command_line.run(main)
'''
BENCHMARK = '''
"""Prints its own config, under the overrides."""
from absl import flags
import fiddlex.terminal.command_line
from fiddlex.config import Config, ModelConfig

_CONFIG = fiddlex.terminal.command_line.define_changes(Config(model=ModelConfig(num_layers=8)))
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_SIZES = flags.DEFINE_list("sizes", ["2", "3"], "sizes")
_TURNS = flags.DEFINE_multi_integer("turns", [], "turns")

def main(argv):
    print(_CONFIG.value.to_json())

if __name__ == "__main__":
    fiddlex.terminal.command_line.run(main)
'''
CONFIG_FILE = """
from fiddlex.config import Config, MeshConfig

def get_config():
    return Config(mesh=MeshConfig(data=2, sequence_parallel=True))
"""
BYPASSED = """from fiddlex.config import Config

def get_config():
    config = Config()
    vars(config.mesh).update(data="2")
    return config
"""
SUBCLASS = "import fiddlex.config\nclass MyConfig(fiddlex.config.Config):\n    pass\nget_config = MyConfig\n"


@pytest.fixture
def folder(tmp_path):
    texts = {"train.py": TRAIN, "evaluate.py": EVALUATE, "benchmark.py": BENCHMARK, "tiny.py": CONFIG_FILE}
    texts["flagfile"], texts["nul"] = "--config.mesh.dta=2\n", "--config.data.source=text:\0\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: pathlib.Path, program: str, *arguments: str) -> Ended:
    with started(folder / program, *arguments, "--workdir=w", cwd=folder, strict=True) as running:
        return running.wait()


def test_the_command_line_is_read_without_jax():
    subprocess.run(
        [sys.executable, "-c", "import sys, fiddlex.terminal.command_line; sys.exit('jax' in sys.modules)"], check=True
    )


def test_overrides_are_laid_over_the_file(folder):
    done = run(
        folder,
        "train.py",
        "--config=tiny.py",
        "--config.mesh.tensor=2",
        "--config.model.hidden_size",
        "64",
        "--noconfig.mesh.sequence_parallel",
        "--config.optimizer.learning_rate=1",
        "--config.data.source=text:a=b",
    )
    assert done.returncode == 0, done.stderr
    expected = Config(mesh=MeshConfig(data=2, tensor=2))
    expected.model.hidden_size, expected.optimizer.learning_rate, expected.data.source = 64, 1.0, "text:a=b"
    assert Config.from_json(done.stdout) == expected


@pytest.mark.parametrize(
    "config", [["--config=tiny.py"], ["--config", "tiny.py"], ["-config=tiny.py"], ["--flagfile=choice"]]
)
def test_overrides_may_stand_before_the_file(folder, config):
    (folder / "choice").write_text("--config=tiny.py\n")
    done = run(folder, "train.py", "--config.mesh.tensor=2", "--error", "", *config, "--config.mesh.data", "4")
    assert done.returncode == 0, done.stderr
    assert Config.from_json(done.stdout).mesh == MeshConfig(data=4, tensor=2, sequence_parallel=True)


def test_of_two_files_the_last_holds_under_all_overrides(folder):
    (folder / "other.py").write_text(CONFIG_FILE.replace("data=2", "data=8"))
    done = run(folder, "train.py", "--config=tiny.py", "--config.mesh.tensor=2", "--config=other.py")
    assert done.returncode == 0, done.stderr
    assert Config.from_json(done.stdout).mesh == MeshConfig(data=8, tensor=2, sequence_parallel=True)


def test_overrides_are_laid_over_the_workdirs_config(folder):
    done = run(folder, "evaluate.py", "--config.mesh.data", "1", "--config.mesh.sequence_parallel")
    assert done.returncode == 0, done.stderr
    assert Config.from_json(done.stdout) == Config(mesh=MeshConfig(data=1, tensor=2, sequence_parallel=True))


def test_overrides_are_laid_over_the_programs_own_config(folder):
    done = run(folder, "benchmark.py", "--config.mesh.data=2")
    assert done.returncode == 0, done.stderr
    assert Config.from_json(done.stdout) == Config(mesh=MeshConfig(data=2), model=ModelConfig(num_layers=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.model.hiden_size=8"], "config.model has no field 'hiden_size'. Did you mean 'hidden_size'?"),
        (["--noconfig.mesh.sequence_paralel"], "config.mesh has no field 'sequence_paralel'. Did you mean"),
        (["--config.modle.hidden_size", "8"], "config has no field 'modle'. Did you mean 'model'?"),
        (["--config.train.keep_checkpoints=3"], "'keep_checkpoints'. It was replaced by keep_last, which counts the"),
        (["--config.mesh=2"], "config.mesh is a section and has no value of its own. Set one of its fields: data, "),
        (["--config.model.hidden_size=1.5"], "config.model.hidden_size='1.5' must be of type int, a whole number."),
        (
            ["--config.optimizer.zero1=maybe"],
            "config.optimizer.zero1='maybe' must be of type bool: use true or false.",
        ),
        (
            ["--config.mesh.tensor=2", "--config.data.global_batch_size=12", "--config.pipeline.num_microbatches=4"],
            "data.global_batch_size=12 with mesh.data=2 gives a replica 6 examples, which is not a multiple of "
            "pipeline.num_microbatches=4: a replica's batch is cut into equal microbatches. Use "
            "pipeline.num_microbatches 1, 2, 3, 6, or data.global_batch_size 8 or 16.",
        ),
        (
            ["--noconfig.optimizer.zero1", "--config.optimizer.zero1", "--config.mesh.pipe=two"],
            "config.mesh.pipe='two' must be of type int, a whole number.",
        ),
        (
            ["--config.mesh.sequence_parallel", "False"],
            "'False' is not a flag. A bool takes its value after =: write --config.mesh.sequence_parallel=false.",
        ),
        (["--workdri=a"], "there is no flag --workdri. Did you mean --workdir=a?"),
        (["--config.model.num_heads=3"], "model.hidden_size=128 is not a multiple of model.num_heads=3"),
        (
            ["--config.pipeline.recompute=gelus"],
            "pipeline.recompute='gelus' is not one of attention, gelu, ",
        ),
        (
            ["--config.pipeline.recompute=gelu,norm"],
            "pipeline.recompute=gelu,norm lists 'norm', which is not one of attention, ",
        ),
        (
            ["--config.pipeline.stash_dtype=in8"],
            "pipeline.stash_dtype='in8' is not one of same, float8_e4m3fn, int8. Did you mean 'int8'?",
        ),
        (
            ["--config.pipeline.stash_dtype=int8", "--config.pipeline.recompute=full"],
            "pipeline.stash_dtype=int8 with pipeline.recompute=full: it changes nothing. The stash then holds only the "
            "inputs of layers, and these are never encoded. Use pipeline.stash_dtype=same, or another",
        ),
        (["--config.pipeline.recompute=gelu,full"], "pipeline.recompute=gelu,full: full stands by itself. Leave"),
        (["--config.pipeline.recompute=gelu,gelu"], "pipeline.recompute=gelu,gelu names gelu twice. Name it once."),
        (["--flagfile=flagfile"], "config.mesh has no field 'dta'. Did you mean 'data'?"),
        (["--flagfile=nothere"], "Unable to open flagfile"),
        (["--flagfile=nul"], "'--config.data.source=text:\\x00' contains a NUL character, which no command line can "),
        (["--config=tny.py"], "tny.py. Did you mean tiny.py?"),
        (["a", "--config.mesh.dta=1"], "config.mesh has no field 'dta'. Did you mean 'data'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistake_in_the_command_line(folder, arguments, message):
    assert_message(run(folder, "train.py", "--config=tiny.py", *arguments), message, program="train.py")


@pytest.mark.parametrize("arguments", [[], ["--config.mesh.data=2"]])
def test_config_is_required(folder, arguments):
    assert_message(run(folder, "train.py", *arguments), "--config is required: name that ", program="train.py")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.mesh.dta=1", "config.mesh has no field 'dta'. Did you mean 'data'?"),
        ("--config.mesh.data=one", "config.mesh.data='one' must be of type int, a whole number."),
        (
            "--config=tiny.py",
            "--config=tiny.py: this program takes its config from the workdir, and the file",
        ),
    ],
)
def test_mistake_where_the_config_is_in_a_workdir(folder, argument, message):
    assert_message(run(folder, "evaluate.py", argument), message, program="evaluate.py")


def test_a_program_with_a_config_of_its_own_takes_no_file(folder):
    message = "--config=tiny.py: this program has a config of its own. Override single fields of it, as --config.sec"
    assert_message(run(folder, "benchmark.py", "--config=tiny.py"), message, program="benchmark.py")


def test_message_of_a_broken_config_file_reaches_the_user(folder):
    (folder / "broken.py").write_text("def get_config(:\n")
    assert_message(
        run(folder, "train.py", "--config=broken.py"), "broken.py, line 1: invalid syntax", program="train.py"
    )


def test_error_of_the_program_itself_has_status_1(folder):
    done = run(folder, "train.py", "--config=tiny.py", "--error=checkpoint")
    assert (done.returncode, done.stderr) == (1, "train.py: the checkpoint is gone.\n")


def caused(error: FiddlexError, cause: Exception) -> FiddlexError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DataError(), 2),
        (caused(DataError(), ValueError()), 2),
        *[
            (caused(DataError(), OSError(number, "")), 2)
            for number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)
        ],
        *[(caused(DataError(), OSError(number, "")), 1) for number in (errno.EIO, errno.ENOSPC, errno.ESTALE)],
        (caused(DataError(), caused(DataError(), OSError(errno.EIO, ""))), 1),
        (caused(DataError(), gzip.BadGzipFile("Not a gzipped file")), 2),
        (caused(ConfigError(), OSError(errno.EIO, "")), 2),
        (CheckpointError(), 1),
    ],
)
def test_data_that_cannot_be_read_or_written_now_is_no_mistake(error: FiddlexError, status: int) -> None:
    assert _status(error) == status


@pytest.mark.parametrize(
    ("error", "arguments", "remedies"),
    [
        (
            "memory",
            [],
            "raise pipeline.num_microbatches (at most 16), or set pipeline.recompute=gelu,norms, or set "
            "pipeline.recompute=full, or set mesh.data=1 and pipeline.num_microbatches=2, or train a smaller model.",
        ),
        (
            "internal",  # while the train state is made
            ["--config.pipeline.recompute=full", "--config.pipeline.num_microbatches=32", "--config.mesh.data=1"],
            "train a smaller model.",
        ),
        (
            "memory",
            ["--config.pipeline.num_microbatches=16", "--noconfig.optimizer.zero1"],
            "set pipeline.recompute=gelu,norms, or set pipeline.recompute=full, or set mesh.data=1 and "
            "pipeline.num_microbatches=32, or set optimizer.zero1=True, or train a smaller model.",
        ),
        (
            "memory",
            ["--config.pipeline.num_microbatches=16", "--config.pipeline.stash_dtype=int8"],
            "set pipeline.recompute=gelu,norms, or set pipeline.recompute=full and pipeline.stash_dtype=same, or set "
            "mesh.data=1 and pipeline.num_microbatches=32, or train a smaller model.",
        ),
    ],
)
def test_lack_of_memory_names_what_the_config_still_allows(folder, error, arguments, remedies):
    done = run(folder, "train.py", "--config=tiny.py", f"--error={error}", *arguments)
    where = "The machine's memory, which the fake devices share, is full"
    assert done.returncode == 1
    kind = {"memory": "RESOURCE_EXHAUSTED", "internal": "INTERNAL"}[error]
    assert (
        done.stderr == f"train.py: {where}: {remedies}\nIt was predicted.\n{kind}: Out of memory allocating 1 byte.\n"
    )


def test_lack_of_memory_of_a_program_without_a_config(folder):
    program = TRAIN.replace("_CONFIG = fiddlex.terminal.command_line.define_config()\n", "")
    (folder / "bare.py").write_text(program.replace("print(_CONFIG.value.validate().to_json())", ""))
    done = run(folder, "bare.py", "--error=memory")
    assert done.returncode == 1
    assert done.stderr.startswith("bare.py: The machine's memory, which the fake devices share, is full: end other pro")


@pytest.mark.parametrize(
    ("tensor", "remedies"),
    [
        (2, "set optimizer.offload=True, or raise mesh.tensor, or train a smaller model"),
        (4, "set optimizer.offload=True, or train a smaller model"),
    ],
)
def test_more_devices_help_where_each_has_its_memory(tensor, remedies):
    config = Config(mesh=MeshConfig(tensor=tensor), pipeline=PipelineConfig(num_microbatches=32, recompute="full"))
    assert _memory_advice(config, "gpu") == f"The memory of a device is full: {remedies}."


@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", GENERATORS)
def test_a_stash_on_the_host_is_proposed_wherever_a_schedule_copies_to_it(schedule, pipe):
    num_copying = 0
    for chunks, m in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        pipeline = PipelineConfig(schedule, num_chunks=chunks, num_microbatches=m)
        config = Config(mesh=MeshConfig(pipe=pipe), pipeline=pipeline)
        with contextlib.suppress(ScheduleError):  # the schedule does not have so many chunks, or so few microbatches
            made = make_schedule(schedule, pipe=pipe, chunks=chunks, num_microbatches=m)
            if lower(made, spills=True).host_stash_slots:
                num_copying += 1
                assert "set pipeline.stash_memory=host" in memory_remedies(config, fake=False)
                assert "set pipeline.stash_memory=host" not in memory_remedies(config, fake=True)
            if schedule == "1f1b" and pipe <= 2:
                assert "set pipeline.stash_memory=host" not in memory_remedies(config, fake=False)
    assert num_copying or (schedule, pipe) not in [("gpipe", 1), ("1f1b", 3), ("interleaved_1f1b", 2), ("zb_v", 2)]


@pytest.mark.parametrize(
    ("fields", "proposed"),
    [
        ([], True),
        (["optimizer.offload=false"], False),
        (["pipeline.num_chunks=2"], False),
        (["pipeline.schedule=gpipe", "pipeline.num_chunks=1"], False),
        (["pipeline.semantics=2bw"], False),
        (["pipeline.weights_memory=host"], False),
    ],
)
def test_weights_on_the_host_are_proposed_where_they_can_be(fields, proposed):
    basis = "pipeline.schedule=breadth_first", "pipeline.num_chunks=4", "optimizer.offload=true"
    config = override(Config(), *basis, *fields).validate()
    assert ("set pipeline.weights_memory=host" in memory_remedies(config, fake=False)) == proposed


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(folder, flag):
    done = run(folder, "train.py", flag)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Prints the config that it would run; --error raises what training might."
    assert "  --config       required: name that `fiddlex configs` lists, or file.py, " in done.stdout
    assert "  --workdir      required: folder of the run" in lines
    assert "mesh: Devices along each axis of the mesh. The product is the number of devices the run uses." in lines
    assert "  mesh.pipe=1                  pipeline ranks, each with pipeline.num_chunks stages" in lines
    for section, fields in dataclasses.asdict(Config()).items():
        assert f"\n{section}: " in done.stdout
        assert all(f"\n  {section}.{name}={value!r} " in done.stdout for name, value in fields.items())
    assert max(map(len, lines)) <= 120


def test_help_tells_the_defaults_of_the_programs_own_config(folder):
    done = run(folder, "benchmark.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "  --config       only as --config.section.field=value, which changes the program's own config" in lines
    assert "  --sizes        sizes (default 2, 3)" in lines
    assert "  --turns        turns; repeat this option to specify a list of values" in lines
    assert "\n  model.num_layers=8             layers of the transformer, in all stages together\n" in done.stdout


def test_bug_keeps_its_traceback(folder):
    done = run(folder, "train.py", "--config=tiny.py", "--error=bug")
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config():\n    return (\n", "broken.py, line 2: '(' was never closed."),
        ("config = 1\n", "broken.py has no function get_config(); --config needs one that returns a Config."),
        ("get_config = 3\n", "broken.py has no function get_config()"),
        ("def get_config():\n    return {'a': 1}\n", "get_config() of broken.py returned {'a': 1}; it must return a "),
        ("def get_config():\n    pass\n", "get_config() of broken.py returned None; it must return a Config."),
        ("def get_config():\n\n    return foo\n", "broken.py, line 3: NameError: name 'foo' is not defined"),
        ("import json\n\njson.loads('{')\n", "broken.py, line 3: JSONDecodeError: "),  # raised in another file
        ("import nothing_of_this_name\n", "broken.py, line 1: ModuleNotFoundError: No module named 'nothing_of_this_"),
        ("def get_config(name):\n    pass\n", "broken.py: TypeError: get_config() missing 1 required positional "),
        (
            "\nraise SystemExit(0)\n",
            "broken.py, line 2: SystemExit(0) would end the program. A file that a program runs must not ",
        ),
        ("import sys\ndef get_config():\n    sys.exit('no')\n", "broken.py, line 3: SystemExit('no') would end the "),
        ("raise SyntaxError('mine')\n", "broken.py, line 1: mine."),
        ("a = '\0'\n", "broken.py: source code string cannot contain null bytes."),
        (BYPASSED, "broken.py: config.mesh.data='2' is a str; it must be of type int."),
        (SUBCLASS, "get_config() of broken.py returned MyConfig(mode"),
    ],
)
def test_config_file_at_fault(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config("broken.py")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.train.log_every = 0.5", "config.train.log_every=0.5 is a float; it must be of type int."),
        ("MeshConfig(data='2')", "config.mesh.data='2' is a str; it must be of type int."),
        ("config.model.num_layer = 4", "config.model has no field 'num_layer'. Did you mean 'num_layers'?"),
        ("config.mesh = 3", "config.mesh=3 is an int; it must be of type MeshConfig."),
        ("del config.mesh", "config.mesh cannot be deleted; every field has a value. Set it instead."),
        ("config.mesh.data = 0; config.validate()", "mesh.data=0 must be at least 1 and below 2147483648."),
        ("config.data.source = 'text:\\0'", "config.data.source='text:\\x00' contains a NUL character, which no path "),
    ],
)
def test_line_of_a_config_file_that_sets_a_wrong_value(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    header = "from fiddlex.config import Config, MeshConfig\n\ndef get_config():\n    config = Config()\n"
    (tmp_path / "wrong.py").write_text(f"{header}    {line}\n    return config\n")
    with pytest.raises(ConfigError) as raised:
        load_config("wrong.py")
    assert str(raised.value).startswith(f"wrong.py, line 5: {message}")


def test_interrupt_of_a_config_file_stays_an_interrupt(folder):
    (folder / "slow.py").write_text("raise KeyboardInterrupt\n")
    done = run(folder, "train.py", "--config=slow.py")
    assert (done.returncode, done.stderr) == (130, "train.py: interrupted.\n")


def test_config_error_of_get_config_is_left_alone(tmp_path):
    path = tmp_path / "choosy.py"
    path.write_text("from fiddlex.errors import ConfigError\n\ndef get_config(name):\n    raise ConfigError(name)")
    with pytest.raises(ConfigError, match=r"^a:b$"):
        load_config(f"{path}:a:b")


@pytest.mark.parametrize("path", ["nothere.py", "nofolder/nothere.py"])
def test_missing_config_file_is_named_in_full(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value) == f"there is no config file {tmp_path / path}."


def assert_message(done: Ended, message: str, *, program: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith(f"{program}: ")
    assert done.stderr.count("\n") <= 2


def test_ctrl_c_is_not_lost_in_the_garbage_collector(monkeypatch):
    """Python passes over what a callback of the collector raises, so the signal is sent again after it."""
    sent = threading.Event()
    monkeypatch.setattr(os, "kill", lambda process, number: sent.set())

    def callback(phase, info):
        _interrupt(signal.SIGINT, sys._getframe())

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)
    assert sent.wait(timeout=10)
    with pytest.raises(KeyboardInterrupt):
        _interrupt(signal.SIGINT, sys._getframe())
