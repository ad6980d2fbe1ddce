"""The systems that fiddlex can be compared with, as `--against` names them: `NAME` or `NAME:option=value[:…]`."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks.systems import FIDDLEX_DRIVER
from fiddlex.config import Config, rules
from fiddlex.config.overrides import override
from fiddlex.errors import ConfigError

DEVICES = ("cpu", "cuda")
_DTYPES = ("float32", "bfloat16")
IN_FLOAT32 = "fiddlex:model.dtype=float32:pipeline.recompute=full"  # little memory; recomputation changes no result
_SPLIT_BACKWARD = ("processes", "layers", "microbatches")
_PIPELINE = (*_SPLIT_BACKWARD, "compile")  # torch 2.13 cannot split the backward pass of a compiled stage


@dataclasses.dataclass(frozen=True)
class Known:
    """A system with a driver in `third_party/`.

    Attributes:
      driver: the driver's module.
      environment: the name by which `--python` gives the Python that has the system's packages.
      packages: the packages that this Python must be able to import.
      install: what pip installs them from.
      mode: the driver's option `mode`; empty when it has none.
      options: the names of the options that the user may give.
      cloned: the name by which `--clone` gives a clone of the system's source; empty when the driver needs none.
      source: the address of that source.
      devices: the devices on which the driver can train.
      dtypes: the dtypes of arithmetic that the driver knows.
    """

    driver: str
    environment: str
    packages: tuple[str, ...]
    install: str
    mode: str = ""
    options: tuple[str, ...] = ()
    cloned: str = ""
    source: str = ""
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)


def _torch(mode: str, *options: str) -> Known:
    packages, devices = ("torch", "numpy"), DEVICES if mode in ("eager", "compile") else ("cpu",)
    driver, install = "third_party.torch.driver", "torch==2.13.0 numpy"
    return Known(driver, "torch", packages, install, mode, options, devices=devices, dtypes=_DTYPES)


def _spectrax(mode: str) -> Known:
    packages, options = ("spectrax", "optax"), ("processes", "microbatches")
    return Known("third_party.spectrax.driver", "spectrax", packages, "spectrax-lib optax", mode, options)


def _of_clone(name: str, mode: str) -> Known:
    source = f"https://github.com/karpathy/{name}"
    driver, packages, options = f"third_party.{name.lower()}.driver", ("torch", "numpy"), ("microbatches",)
    install, clone = "torch==2.13.0 numpy", name.lower()
    return Known(driver, "torch", packages, install, mode, options, clone, source, DEVICES, _DTYPES)


KNOWN: Mapping[str, Known] = {
    "torch": _torch("eager", "microbatches"),
    "torch-compile": _torch("compile", "microbatches"),
    "torch-gpipe": _torch("gpipe", *_PIPELINE),
    "torch-1f1b": _torch("1f1b", *_PIPELINE),
    "torch-interleaved": _torch("interleaved", *_PIPELINE),
    "torch-interleaved-zb": _torch("interleaved-zb", *_SPLIT_BACKWARD),
    "torch-zbv": _torch("zbv", *_SPLIT_BACKWARD),
    "nanogpt": _of_clone("nanoGPT", "eager"),
    "nanogpt-compile": _of_clone("nanoGPT", "compile"),
    "nanochat": _of_clone("nanochat", "eager"),
    "nanochat-compile": _of_clone("nanochat", "compile"),
    "spectrax-gpipe": _spectrax("gpipe"),
    "spectrax-1f1b": _spectrax("1f1b"),
    "spectrax-zb-h1": _spectrax("zb-h1"),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A system that the user asked for.

    Attributes:
      name: what the user wrote, which names the system in the table.
      command: the command line of its driver, without the job.
      own: the fields of the job that are this system's own.
    """

    name: str
    command: tuple[str, ...]
    own: dict[str, Any] = dataclasses.field(default_factory=dict)


def ask(
    text: str, config: Config, *, pythons: Mapping[str, str], clones: Mapping[str, str], device: str = "cpu"
) -> Asked:
    """The system of a text `NAME[:option=value[:…]]`; of `fiddlex`, the options are fields of the config.

    Args:
      text: the text.
      config: the config that such fields change.
      pythons: the Python of each environment; by default this program's.
      clones: the path of each system's clone.
      device: the device that trains, `cpu` or `cuda`.

    Raises:
      ConfigError: when the system or an option is not known, an option has no value that the driver takes, its driver
        does not know the device or the config's dtype, or a package or a clone that it needs is missing.
    """
    name, *options = text.split(":")
    if name == "fiddlex":
        changed = override(config, *options).validate()
        return Asked(text, (sys.executable, "-m", FIDDLEX_DRIVER), {"config": as_json(changed)})
    if name not in KNOWN:
        raise ConfigError(f"--against={text}: there is no {name!r}. Use one of fiddlex, {', '.join(KNOWN)}.")
    known = KNOWN[name]
    given = dict(option.partition("=")[::2] for option in options)
    for option, value in given.items():
        if option not in known.options or not value:
            having = ", ".join(known.options) or "none"
            raise ConfigError(f"--against={text}: write {name}:OPTION=VALUE. The options of {name} are {having}.")
    _require_values(text, given, config)
    _require_known(text, known, device, config.model.dtype)
    python = program(pythons.get(known.environment, sys.executable))
    require_packages(name, known, python)
    mode = {"mode": known.mode} if known.mode else {}
    own = {"options": given | mode, "clone": _clone(name, known, clones)}
    return Asked(text, (python, "-m", known.driver), own)


def _require_values(text: str, given: Mapping[str, str], config: Config) -> None:
    where = f"--against={text}: "
    numbers = [(option, given[option]) for option in ("microbatches", "processes") if option in given]
    numbers += [("layers", size) for size in given.get("layers", "1").split("+")]
    for option, value in numbers:
        if not (value.isascii() and value.isdecimal()):
            raise ConfigError(f"{where}{option}={value}: {value!r} is not a whole number. Use one from 1 on.")
        rules.at_least(f"{where}{option}", int(value), 1)
    layers, processes = config.model.num_layers, int(given.get("processes", "1"))
    if processes > layers:
        raise ConfigError(
            f"{where}processes={processes}: each runs a layer at least, and model.num_layers is {layers}. Use {layers} "
            "or fewer."
        )
    rules.choice(f"{where}compile", given.get("compile", "no"), ("yes", "no"))
    rules.divides(
        f"{where}data.global_batch_size",
        config.data.global_batch_size,
        "microbatches",
        int(given.get("microbatches", "1")),
        "drivers give all microbatches as many examples",
    )


def _require_known(text: str, known: Known, device: str, dtype: str) -> None:
    if device not in known.devices:
        raise ConfigError(
            f"--against={text} with --device={device}: its driver trains on {' and '.join(known.devices)} alone. Leave "
            f"it out, or use one of {', '.join(name for name, each in KNOWN.items() if device in each.devices)}."
        )
    if dtype not in known.dtypes:
        raise ConfigError(
            f"--against={text} with model.dtype={dtype}: its driver computes in {' and '.join(known.dtypes)} alone. "
            f"Leave it out, or use one of {', '.join(name for name, each in KNOWN.items() if dtype in each.dtypes)}."
        )


def as_json(config: Config) -> dict[str, Any]:
    """The config as a job has it."""
    values: dict[str, Any] = json.loads(config.to_json())
    return values


def program(path: str) -> str:
    """The path of a program from the folder `/`; a name without a folder, which PATH finds, is kept.

    Links are not followed: a virtual environment's Python is one.
    """
    return os.path.abspath(path) if os.sep in path else path


def require_packages(name: str, known: Known, python: str) -> None:
    """Checks that a Python has the packages of a system, without importing them.

    Raises:
      ConfigError: when it does not; the message says how to install them.
    """
    program = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    remedy = (
        "Install what it needs in an environment of its own:\n  python -m venv ENV && ENV/bin/pip install "
        f"{known.install}\nthen add --python={known.environment}=ENV/bin/python."
    )
    try:
        # Not in the root of the repository, where third_party/ is.
        done = subprocess.run([python, "-c", program, *known.packages], capture_output=True, text=True, cwd="/")
    except OSError as error:
        raise ConfigError(f"--against={name}: {python} does not start ({error.strerror}). {remedy}") from error
    if done.returncode:
        last = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
        raise ConfigError(f"--against={name}: {python} does not start ({last}). {remedy}")
    if missing := done.stdout.split():
        raise ConfigError(f"--against={name}: {python} has no {' and no '.join(missing)}. {remedy}")


def _clone(name: str, known: Known, clones: Mapping[str, str]) -> str:
    if not known.cloned:
        return ""
    clone = clones.get(known.cloned, "")
    if not clone or not pathlib.Path(clone).is_dir():
        raise ConfigError(
            f"--against={name}: --clone={known.cloned}={clone} is no folder. Clone {known.source}, and name the folder."
        )
    return str(pathlib.Path(clone).resolve())


def pairs(flag: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The values of a flag that was given as `NAME=VALUE`, by name.

    Raises:
      ConfigError: when a text has another form, or its name is not one of `names`.
    """
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not value or name not in names:
            known = ", ".join(sorted(set(names)))
            raise ConfigError(f"--{flag}={text}: write NAME=PATH, where NAME is one of {known}.")
        found[name] = value
    return found
