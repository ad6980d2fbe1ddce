"""Starts the processes of a run, or writes a job file for Slurm, Kubernetes, Open MPI or ssh.

    fiddlex launch local --processes=4 --devices_per_process=2 -- train --config=gpt_tiny --workdir=/tmp/run
    fiddlex launch task -- train --config=gpt_tiny --workdir=/shared/run --coordinator_address=host0:12345 …
    fiddlex launch slurm|jobset|mpi|ssh --config=gpt3:18.4b --topology=h100 --num_devices=256 --workdir=/shared/run

`local` starts all processes of a run on this machine, on fake CPU devices. `task` starts one process of a run, and is
what job files start on every host. Both restart a program that fails. `slurm`, `jobset` (Kubernetes), `mpi` (Open MPI)
and `ssh` print a job file for a config, such as one that `fiddlex plan --write` made; `--write` writes it to a file.
docs/launch.md has what each job file contains. Where only some of these kinds take a flag, its text begins with them.
"""

import logging
import os
import pathlib
import socket
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from fiddlex.cluster.coordinator import MOST_SECONDS
from fiddlex.config import Config, rules
from fiddlex.config.paths import made_absolute
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.launch import programs
from fiddlex.launch.job import Job, Options, make_job
from fiddlex.launch.jobset import JobSetOptions, jobset_manifest
from fiddlex.launch.mpi import mpi_script
from fiddlex.launch.slurm import SlurmOptions, slurm_script
from fiddlex.launch.slurm_site import save_time_warning
from fiddlex.launch.ssh import ssh_script
from fiddlex.launch.supervisor import MAX_RESTARTS, Limits, supervise
from fiddlex.terminal.command_line import define_config, define_path

logger = logging.getLogger("fiddlex.launch")

_FILES = ("slurm", "jobset", "mpi", "ssh")
ARGUMENT_CHOICES = (*_FILES, "local", "task")
ARGUMENT = f"what starts the processes: {', '.join(ARGUMENT_CHOICES)}"
TAKES_PROGRAM = True

_FLAGS: dict[str, tuple[str, ...]] = {}  # the kinds that each flag belongs to


def _for(kinds: Sequence[str], holder: flags.FlagHolder) -> flags.FlagHolder:
    _FLAGS[holder.name] = tuple(kinds)
    if set(kinds) != set(ARGUMENT_CHOICES):
        flag = flags.FLAGS[holder.name]
        flag.help = f"({'job files' if kinds == _FILES else ', '.join(kinds)}) {flag.help}"
    return holder


_for(_FILES, define_config(required=False))
_TOPOLOGY = _for(_FILES, flags.DEFINE_string("topology", None, "name of the catalogue, or a .toml file"))
_NUM_DEVICES = _for(_FILES, flags.DEFINE_integer("num_devices", None, "number of devices of the run", lower_bound=1))
_WORKDIR = _for(_FILES, define_path("workdir", None, "directory of the run, which all hosts share"))
_WRITE = _for(_FILES, define_path("write", None, "file to write the job file to; by default it is printed"))
_NAME = _for(_FILES, flags.DEFINE_string("name", "", "name of the job; by default the last part of the workdir"))
_PYTHON = _for(
    _FILES,
    flags.DEFINE_string(
        "python", "", "path of Python on the hosts; by default the one that runs this, in containers python"
    ),
)
_ENV = _for(_FILES, flags.DEFINE_multi_string("env", [], "NAME=VALUE, an environment variable of the processes"))
_PER_HOST = _for(
    _FILES,
    flags.DEFINE_integer(
        "devices_per_host", None, "number of devices of a host; by default the topology's", lower_bound=1
    ),
)
_PROCESSES_PER_HOST = _for(
    _FILES, flags.DEFINE_integer("processes_per_host", 1, "number of processes of a host without TPUs", lower_bound=1)
)
_FAKE = _for(
    ["slurm", "mpi", "ssh"],
    flags.DEFINE_integer(
        "fake_devices",
        None,
        "number of CPU devices of each process, for hosts without accelerators, in place of --topology",
        lower_bound=1,
    ),
)
_GRACE_S = _for(
    _FILES,
    flags.DEFINE_integer(
        "grace_s",
        300,
        "seconds that the processes have to save, after the notice that the job will end",
        1,
        MOST_SECONDS,
    ),
)
_JOIN_S = _for(
    _FILES,
    flags.DEFINE_integer("join_timeout_s", None, "seconds in which all processes have to join", 1, MOST_SECONDS),
)
_PARTITION = _for(["slurm"], flags.DEFINE_string("partition", "", "Slurm's partition"))
_ACCOUNT = _for(["slurm"], flags.DEFINE_string("account", "", "Slurm's account"))
_QOS = _for(["slurm"], flags.DEFINE_string("qos", "", "Slurm's quality of service"))
_TIME_LIMIT = _for(["slurm"], flags.DEFINE_string("time_limit", "", "Slurm's limit of time, such as 1-00:00:00"))
_CPUS = _for(
    ["slurm"],
    flags.DEFINE_integer("cpus_per_task", None, "cores of a process; by default all of whole nodes", lower_bound=1),
)
_IMAGE = _for(["jobset"], flags.DEFINE_string("image", "", "container image, which has fiddlex"))
_CLAIM = _for(
    ["jobset"],
    flags.DEFINE_string("volume_claim", "", "claim of the volume that is mounted at the workdir's first folder"),
)
_QUEUE = _for(["jobset"], flags.DEFINE_string("queue", "", "Kueue's queue, which starts the job when there is room"))
_SLICES = _for(["jobset"], flags.DEFINE_integer("num_slices", 1, "number of equal slices of TPUs", lower_bound=1))
_HOSTS = _for(["mpi", "ssh"], flags.DEFINE_list("hosts", [], "names of the hosts, separated by commas"))
_PORT = _for(
    ["jobset", "mpi", "ssh"],
    flags.DEFINE_integer("port", 12345, "port of the first host, at which the processes meet", 1, 2**16 - 1),
)
_PROCESSES = _for(["local"], flags.DEFINE_integer("processes", None, "number of processes to start", lower_bound=1))
_PER_PROCESS = _for(
    ["local", "task"],
    flags.DEFINE_integer(
        "devices_per_process",
        None,
        "number of devices of each process: for local fake ones, for task GPUs",
        lower_bound=1,
    ),
)
_MAX_RESTARTS = _for(
    ARGUMENT_CHOICES, flags.DEFINE_integer("max_restarts", MAX_RESTARTS, "number of restarts at most", lower_bound=0)
)
_ELASTIC = _for(
    ARGUMENT_CHOICES,
    flags.DEFINE_bool(
        "elastic",
        False,
        "go on with fewer processes when some do not join within --join_timeout_s; not for jobset and mpi",
    ),
)


def main(argv: list[str]) -> None:
    """Starts the processes and exits with their status, or prints or writes the job file."""
    _, kind, *program = argv
    if kind not in ARGUMENT_CHOICES:
        raise ConfigError(f"nothing is launched by {kind!r}. {rules.nearest(kind, ARGUMENT_CHOICES)}")
    for name, kinds in _FLAGS.items():
        if flags.FLAGS[name].present and kind not in kinds:
            raise ConfigError(f"--{name} is not a flag of launch {kind}, but of {', '.join(kinds)}. Leave it out.")
    if kind not in _FILES and config_flags.get_override_values(flags.FLAGS["config"]):
        raise ConfigError(f"launch {kind} has no config of its own. Put --config.section.field=value after --.")
    if kind in _FILES:
        if program:
            raise ConfigError(f"launch {kind} takes no program after --; it starts train with --config.")
        _output(_file(kind), pathlib.Path(_WRITE.value) if _WRITE.value else None, executable=kind != "jobset")
    else:
        sys.exit(_start(kind, program))


def _start(kind: str, words: list[str]) -> int:
    command = programs.program_command(words, elastic=_ELASTIC.value)
    commands = [command]
    if kind == "local":
        _require(kind, processes=_PROCESSES.value, devices_per_process=_PER_PROCESS.value)
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        commands = programs.local_commands(
            command, num_processes=_PROCESSES.value, devices_per_process=_PER_PROCESS.value, port=port
        )
    elif _PER_PROCESS.value:
        os.environ["JAX_LOCAL_DEVICE_IDS"] = programs.local_device_ids(_PER_PROCESS.value, os.environ)
    name = "launch"
    if kind == "task":  # its messages stand among those of other hosts
        rank = programs.flag_value("process_id", command)
        name += f" ({socket.gethostname()}{f', rank {rank}' if rank else ''})"
    limits = Limits(max_restarts=_MAX_RESTARTS.value, elastic=_ELASTIC.value)
    workdir = programs.flag_value("workdir", command)
    status = supervise(commands, limits, workdir=pathlib.Path(workdir) if workdir else None, name=name)
    if kind == "task":
        programs.leave_status(status, os.environ)
    return status


def _require(kind: str, **values: object) -> None:
    missing = [f"--{name}" for name, value in values.items() if not value]
    if missing:
        raise ConfigError(f"launch {kind} needs {' and '.join(missing)}. fiddlex launch --help explains the flags.")


def _file(kind: str) -> str:
    """The text of the job file."""
    needed = {"config": flags.FLAGS["config"].value, "topology": _TOPOLOGY.value or _FAKE.value}
    needed |= {"num_devices": _NUM_DEVICES.value, "workdir": _WORKDIR.value}
    if kind == "jobset":
        needed |= {"image": _IMAGE.value, "volume_claim": _CLAIM.value}
    elif kind != "slurm":
        needed["hosts"] = _HOSTS.value
    _require(kind, **needed)
    job = _job()
    if kind == "slurm":
        options = SlurmOptions(_PARTITION.value, _ACCOUNT.value, _QOS.value, _TIME_LIMIT.value, _CPUS.value)
        if warning := save_time_warning(options.partition, _GRACE_S.value):
            logger.warning("%s", warning)
        return slurm_script(job, options)
    if kind == "jobset":
        return jobset_manifest(job, JobSetOptions(_IMAGE.value, _CLAIM.value, _PORT.value, _QUEUE.value))
    return {"mpi": mpi_script, "ssh": ssh_script}[kind](job, hosts=_HOSTS.value, port=_PORT.value)


def _job() -> Job:
    given: Config | None = flags.FLAGS["config"].value
    assert given is not None
    config = given.validate()
    if not config.train.checkpoint_every:
        logger.warning(
            "train.checkpoint_every=0: a restart would begin at step 0. Set --config.train.checkpoint_every."
        )
    for flag in (_TOPOLOGY, _PER_HOST):
        if _FAKE.value and flag.value is not None:
            raise ConfigError(
                f"--{flag.name} changes nothing beside --fake_devices, which is for hosts without accelerators."
            )
    pairs = [pair.partition("=") for pair in _ENV.value]
    for pair in pairs:
        if not pair[1]:
            raise ConfigError(f"--env={pair[0]} has no value. Write --env=NAME=VALUE.")
        if [name for name, _, _ in pairs].count(pair[0]) > 1:
            raise ConfigError(f"--env gives {pair[0]} twice. Give each variable once.")
    options = Options(
        name=_NAME.value,
        devices_per_host=_PER_HOST.value,
        processes_per_host=_PROCESSES_PER_HOST.value,
        fake_devices=_FAKE.value,
        num_slices=_SLICES.value,
        grace_s=_GRACE_S.value,
        max_restarts=_MAX_RESTARTS.value,
        elastic=_ELASTIC.value,
        environment={name: value for name, _, value in pairs},
        python=_PYTHON.value,
    )
    return make_job(
        config,
        _train(config),
        topology=load_topology(_TOPOLOGY.value) if _TOPOLOGY.value else None,
        num_devices=_NUM_DEVICES.value,
        workdir=_WORKDIR.value,
        options=options,
    )


def _train(config: Config) -> list[str]:
    """The train command with the config and the overrides of this command line; paths are made absolute."""
    flag = flags.FLAGS["config"]
    spec: str = config_flags.get_config_filename(flag)
    named, colon, argument = spec.partition(":")
    if os.path.isfile(named):
        spec = f"{os.path.abspath(named)}{colon}{argument}"
    overrides = config_flags.get_override_values(flag) | made_absolute(config)
    fields = [f"--config.{name}={value}" for name, value in overrides.items()]
    join = [] if _JOIN_S.value is None else [f"--join_timeout_s={_JOIN_S.value}"]
    return ["train", f"--config={spec}", f"--workdir={_WORKDIR.value}", *fields, *join]


def _output(text: str, path: pathlib.Path | None, *, executable: bool) -> None:
    """Prints the job file, or writes it; a file with other text is not overwritten."""
    encoded = text.encode("utf-8", "surrogateescape")
    if path is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded)
        return
    if path.exists() and not path.is_file():
        raise ConfigError(f"--write={path} is not a file. Name one.")
    try:
        if path.exists() and path.read_bytes() != encoded:
            raise ConfigError(f"--write={path} is there already, with other text. Name another file, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)
        if executable:
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise ConfigError(f"--write={path} cannot be written: {error.strerror}. Name another file.") from error
    logger.info("wrote %s", path)
