"""What a run has registered is found again from its workdir alone, and nothing else that a workdir names is run."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.config.files import load_config
from fiddlex.config.user_code.registries import REGISTRIES, added
from fiddlex.errors import ConfigError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.train.run import registered
from fiddlex.train.run.workdir import read_config, write_config

HEAD = """
from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.config.files import load_config
from fiddlex.schedules.generators import GENERATORS
"""
ENTRIES = """
FAMILIES["own"], GENERATORS["own_order"] = FAMILIES["llama"], GENERATORS["zb_h1"]
"""
GET_CONFIG = """
def get_config():
    config = Config()
    config.model.family, config.pipeline.schedule = "own", "own_order"
    return config
"""
IN_GET_CONFIG = """
def get_config(name):
    if name == "own":
        FAMILIES[name], GENERATORS["own_order"] = FAMILIES["llama"], GENERATORS["zb_h1"]
    return Config()
"""
STYLES = {
    "a file": ("own.py", {"own.py": HEAD + ENTRIES + GET_CONFIG}),
    "a call": ("own.py:own", {"own.py": HEAD + IN_GET_CONFIG}),
    "a module beside it": ("own.py", {"own.py": "import layers\n" + HEAD + GET_CONFIG, "layers.py": HEAD + ENTRIES}),
    "a file that runs another": (
        "plan.py",
        {"own.py": HEAD + ENTRIES + GET_CONFIG, "plan.py": f"{HEAD}load_config('own.py')\n{GET_CONFIG}"},
    ),
}
FIELDS = {"model.family": "own", "pipeline.schedule": "own_order"}


def forget() -> None:
    """Leaves what a process knows that has just started."""
    for registry in REGISTRIES.values():
        for name in list(registry.origins):
            del registry[name]
    for name in ("layers", "extension", "extension.families"):
        sys.modules.pop(name, None)
    registered._found.clear()
    registered._extends.cache_clear()
    registered._tell_once.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    forget()


def begin(run: pathlib.Path, family: str = "own", schedule: str = "own_order") -> None:
    """Writes what a run writes when it begins, with what is registered here."""
    config = Config()
    config.model.family, config.pipeline.schedule = family, schedule
    run.mkdir(exist_ok=True)
    write_config(run, config, schedule=make_schedule("1f1b", pipe=1, num_microbatches=1))


@pytest.fixture
def run(folder: pathlib.Path) -> pathlib.Path:
    """The workdir of a run with `own.py`, read by another process than the run's."""
    (folder / "own.py").write_text(STYLES["a file"][1]["own.py"])
    load_config("own.py")
    begin(folder / "run")
    forget()
    return folder / "run"


@pytest.mark.parametrize("style", STYLES)
def test_each_registry_is_found_again(style: str, folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    spec, files = STYLES[style]
    for name, text in files.items():
        (folder / name).write_text(text)
    load_config(spec)
    begin(folder / "run")
    forget()
    assert not added()
    config = read_config((folder / "run").rename(folder / "moved"))
    assert added().keys() == {*FIELDS.items()}
    assert (config.model.family, config.pipeline.schedule) == ("own", "own_order")
    assert (FAMILIES["own"], GENERATORS["own_order"]) == (FAMILIES["llama"], GENERATORS["zb_h1"])
    assert not caplog.messages
    read_config(folder / "moved")  # again, as some programs do


def test_an_installed_module_is_found_without_the_config_file_and_on_another_machine(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "site" / "extension"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "families.py").write_text(HEAD + ENTRIES)
    (folder / "site" / "extension-1.dist-info").mkdir()
    (folder / "site" / "extension-1.dist-info" / "METADATA").write_text("Name: extension\nVersion: 1\n")
    (folder / "site" / "extension-1.dist-info" / "top_level.txt").write_text("extension\n")
    (folder / "own.py").write_text("import extension.families\n" + HEAD + GET_CONFIG)
    sys.path.append(str(folder / "site"))
    load_config("own.py")
    begin(folder / "run")
    forget()
    (folder / "own.py").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "elsewhere"))
    read_config(folder / "run")
    assert added().keys() == {*FIELDS.items()}
    forget()
    sys.path.remove(str(folder / "site"))
    with pytest.raises(ConfigError, match=r"module extension\.families has registered it, and no package is installed"):
        read_config(folder / "run")


def change(path: pathlib.Path) -> None:
    path.write_text(path.read_text() + "# changed\n")


def elsewhere(path: pathlib.Path) -> None:
    (path.parent / "cache").rename(path.parent / "other_cache")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (pathlib.Path.unlink, r"own\.py has registered it, and cannot be read .* with --config=NEW_PATH\.py or"),
        (change, r"own\.py has registered it, and .*/own\.py has changed since\. .* with --config=/.*/own\.py or"),
        (elsewhere, r"You have trained with no such file here, and nothing else .* --config=/.*/own\.py or"),
    ],
)
def test_a_file_that_is_not_the_runs_own_is_not_run_until_it_is_named(
    edit: Callable[[pathlib.Path], None],
    message: str,
    run: pathlib.Path,
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = (folder / "own.py").read_text()
    edit(folder / "own.py")
    with pytest.raises(ConfigError, match=rf"model\.family='own' of the run in .*/run: .*{message}"):
        read_config(run)
    assert not added()
    (folder / "new.py").write_text(text)
    load_config("new.py")
    caplog.set_level("INFO", "fiddlex")
    assert read_config(run).model.family == "own"
    assert caplog.messages[0].startswith(f"model.family='own': {folder}/new.py has registered it here, and ")
    forget()
    begin(folder / "only", family="gpt")  # a schedule that is not found is the table of the workdir
    record = json.loads((run / registered.RECORD).read_text())
    (folder / "only" / registered.RECORD).write_text(json.dumps(record))
    config = json.loads((folder / "only" / "config.json").read_text())
    assert config["pipeline"]["schedule"] == "own_order"
    assert read_config(folder / "only").pipeline.schedule == f"file:{folder}/only/schedule.csv"
    assert caplog.messages[-1].endswith("Until then the table of the workdir takes its place.")


def test_a_module_beside_the_config_file_that_has_changed_is_told(folder: pathlib.Path) -> None:
    spec, files = STYLES["a module beside it"]
    for name, text in files.items():
        (folder / name).write_text(text)
    load_config(spec)
    begin(folder / "run")
    forget()
    change(folder / "layers.py")
    with pytest.raises(ConfigError, match=r"own\.py or /.*/layers\.py has changed since"):
        read_config(folder / "run")


@pytest.mark.parametrize(
    "entry",
    [
        {"config": "evil.py", "files": ["evil.py"]},
        {"config": "evil.py"},
        {"config": "evil.py", "digest": "../../own.py"},
        {"digest": "0" * 500},
        {"config": "evil.py", "files": [], "digest": ""},
        {"module": "evil"},
        {"module": "absl.app"},
        {"module": ["evil"]},
        {"module": "", "config": "", "files": [], "digest": ""},
        {"config": 3},
    ],
)
def test_what_somebody_else_writes_into_a_record_is_not_run(
    entry: dict[str, object], run: pathlib.Path, folder: pathlib.Path
) -> None:
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path('was_run').touch()\n{HEAD}{ENTRIES}{GET_CONFIG}")
    sys.path.insert(0, str(folder))
    record = json.loads((run / registered.RECORD).read_text())
    changed = {name: f"{folder}/{value}" if value == "evil.py" else value for name, value in entry.items()}
    for field in FIELDS:
        record[field] |= changed
    (run / registered.RECORD).write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"model\.family='own' of the run in .* (Name|name) the file that registers"):
        read_config(run)
    assert not (folder / "was_run").exists()
    load_config("evil.py")
    assert (folder / "was_run").exists()  # so the test would have seen it


def test_two_files_that_register_one_name(run: pathlib.Path, folder: pathlib.Path) -> None:
    other = (folder / "own.py").read_text().replace('FAMILIES["llama"]', 'FAMILIES["gpt"]')
    (folder / "other.py").write_text(other.replace("own_order", "other_order"))
    load_config("other.py")
    begin(folder / "other", schedule="other_order")
    forget()
    read_config(run)
    with pytest.raises(ConfigError, match=r"this process has another of that name, which the run in .*/run had from"):
        read_config(folder / "other")
    forget()
    # A run may take one of both names from a file that registers the other one, too.
    load_config("other.py")
    read_config(run)
    assert FAMILIES["own"] == FAMILIES["gpt"]
    assert {*GENERATORS.origins} == {"own_order", "other_order"}


def test_what_cannot_be_found_again_is_told_when_the_run_begins(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(FAMILIES, "own", FAMILIES["llama"])
    monkeypatch.setitem(GENERATORS, "own_order", GENERATORS["zb_h1"])  # of which the workdir has the table
    begin(folder / "run")
    (message,) = caplog.messages
    assert message == (
        "model.family=own is registered neither by a config file nor by a module of an installed package. Programs "
        f"that read {folder}/run will not find it by themselves. Name the file that registers it, with "
        "--config=FILE.py or, in a config file or a program, with fiddlex.config.files.load_config('FILE.py')."
    )
    assert not (folder / "run" / registered.RECORD).exists()
    (folder / "own.py").write_text(STYLES["a file"][1]["own.py"])
    load_config("own.py")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    begin(folder / "run")
    assert "which cannot be noted as a file of yours" in caplog.messages[1]


def test_a_damaged_record_is_told(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / registered.RECORD).write_text("[]")
    read_config(run)
    assert f"{run}/registered.json cannot be read: it is not a JSON object. What the run had" in caplog.text
