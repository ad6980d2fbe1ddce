"""What a job file says of a run, whatever starts its processes: hosts, processes, devices, and the train command.

Every process runs `fiddlex launch task`, which runs `fiddlex train` under the supervisor. Invariant: the processes have
as many devices as the mesh.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import Topology
from fiddlex.launch.supervisor import MAX_RESTARTS
from fiddlex.terminal.readable import counted

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chooses about a job beside its config and its devices."""

    name: str = ""  # empty: the last part of the workdir
    devices_per_host: int | None = None  # None: as the topology has it
    processes_per_host: int = 1
    # CPU devices of each process, for hosts without accelerators; None: the topology's devices
    fake_devices: int | None = None
    num_slices: int = 1  # number of equal slices of TPUs
    grace_s: int = 300  # seconds from the notice that the job will be ended to its end; a checkpoint is saved in them
    max_restarts: int = MAX_RESTARTS
    elastic: bool = False  # whether the run goes on with fewer hosts
    # further environment variables of the processes
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    python: str = ""  # Python's path on the hosts; empty: the one that runs this program


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, checked."""

    name: str
    workdir: str  # absolute path of the run's directory, which all hosts share
    train: tuple[str, ...]  # the train command after `fiddlex`: `train --config=…`
    topology: Topology | None  # None: CPU devices
    num_hosts: int
    devices_per_process: int
    slice_shape: tuple[int, ...]  # edges of a slice of TPUs; empty for others
    options: Options

    @property
    def num_processes(self) -> int:
        return self.num_hosts * self.options.processes_per_host

    @property
    def runs_on_tpus(self) -> bool:
        return bool(self.slice_shape)

    @property
    def runs_on_gpus(self) -> bool:
        """Whether the devices are GPUs of NVIDIA."""
        return self.topology is not None and not self.runs_on_tpus

    @property
    def gpu_flags(self) -> list[str]:
        """The flags by which a task that Slurm or Open MPI starts takes its share of the GPUs of its host."""
        return [f"--devices_per_process={self.devices_per_process}"] * self.runs_on_gpus

    @property
    def title(self) -> str:
        """One line for people about the job."""
        devices = self.num_processes * self.devices_per_process
        per_chip = self.topology.chip.devices_per_chip if self.topology else 1
        of_chips = f" ({counted(devices, 'device')})" if per_chip > 1 else ""
        processes = (
            "one process" if self.options.processes_per_host == 1 else f"{self.options.processes_per_host} processes"
        )
        hosts = "one host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        name = self.topology.chip.name if self.topology else "CPU device"
        chip = " ".join(name.split())  # a comment in a job file has one line
        return f"{devices // per_chip} × {chip}{of_chips} on {hosts}, {processes} per host"

    def task(self, *flags: str, train_flags: Sequence[str] = (), python: str = "") -> list[str]:
        """The command line of a process: `launch task`, with flags for itself and for the train command."""
        python = self.options.python or python or sys.executable
        elastic = ["--elastic"] * self.options.elastic
        fake = [f"--fake_devices={self.options.fake_devices}"] * (self.options.fake_devices is not None)
        own = [f"--max_restarts={self.options.max_restarts}", *elastic, *flags]
        return [python, "-P", "-m", "fiddlex", "launch", "task", *own, "--", *self.train, *train_flags, *fake]


def make_job(
    config: Config, train: Sequence[str], *, topology: Topology | None, num_devices: int, workdir: str, options: Options
) -> Job:
    """Checks what a job is made of, and works out its hosts and processes.

    The config is validated; `train` is the train command after `fiddlex`. Without a topology the devices are CPUs.
    """
    if topology and not topology.platform:
        raise ConfigError(
            f"--topology={topology.name}: its {topology.chip.name} are neither TPUs nor GPUs of NVIDIA to fiddlex, for "
            "which alone there are job files. If they are such GPUs, copy its file and give chip.device_kinds the name "
            'by which jax calls them, as in ["NVIDIA H20"].'
        )
    _check_mesh(config, num_devices)
    if not os.path.isabs(workdir):
        raise ConfigError(
            f"--workdir={workdir} is relative to the folder of each host. Give an absolute path of a file system that "
            "all hosts share."
        )
    if os.path.normpath(workdir) in ("/", "//"):
        raise ConfigError(f"--workdir={workdir}: a run needs a folder of its own, as in --workdir=/shared/run.")
    name = options.name or os.path.basename(os.path.normpath(workdir))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the job's name {name!r} may have letters, digits and ._- only, and begins with a letter or digit. Give "
            "one with --name."
        )
    for variable in options.environment:
        if not _VARIABLE.fullmatch(variable):
            raise ConfigError(f"--env: {variable!r} is no name of a variable. Write --env=NAME=VALUE.")
    processes = options.processes_per_host
    tpus = topology is not None and topology.platform == "tpu"
    if options.fake_devices is not None:
        options = dataclasses.replace(options, devices_per_host=options.fake_devices * processes)
    num_hosts, per_host, shape = _hosts(topology, num_devices, tpus, options)
    if processes > 1 and tpus:
        raise ConfigError(f"--processes_per_host={processes}: a host of TPUs has one process. Leave it out.")
    if per_host % processes:
        divisors = ", ".join(str(size) for size in range(1, per_host + 1) if per_host % size == 0)
        raise ConfigError(
            f"--processes_per_host={processes} does not divide the {per_host} devices of a host. Use one of {divisors}."
        )
    return Job(name, workdir, tuple(train), topology, num_hosts, per_host // processes, shape, options)


def _check_mesh(config: Config, num_devices: int) -> None:
    mesh = config.mesh
    if mesh.num_devices == num_devices:
        return
    inner = mesh.num_devices // mesh.data
    if num_devices % inner == 0:
        remedy = f"Set --config.mesh.data={num_devices // inner}, or --num_devices={mesh.num_devices}"
    else:
        remedy = f"Choose sizes with a product of {num_devices}, or --num_devices={mesh.num_devices}"
    raise ConfigError(
        f"mesh {mesh.text} has {counted(mesh.num_devices, 'device')}, and --num_devices={num_devices}. {remedy}."
    )


def _hosts(
    topology: Topology | None, num_devices: int, tpus: bool, options: Options
) -> tuple[int, int, tuple[int, ...]]:
    """Number of hosts, of devices of each, and the shape of a slice; empty where the devices are no TPUs."""
    slices = options.num_slices
    if slices > 1 and not tpus:
        raise ConfigError(f"--num_slices={slices}: only TPUs come in slices. Leave it out.")
    if num_devices % slices:
        raise ConfigError(f"--num_slices={slices} does not divide --num_devices={num_devices}. Use equal slices.")
    group = num_devices // slices  # devices that whole hosts hold: a slice, or all GPUs
    shape = _slice(topology, group) if topology and tpus else ()
    per_host = options.devices_per_host
    if per_host is None:
        assert topology  # without one, `fake_devices` has told
        per_host = _devices_of_host(topology, group, tpus)
    if topology and per_host % topology.chip.devices_per_chip:
        raise ConfigError(
            f"--devices_per_host={per_host} is not a multiple of {topology.chip.devices_per_chip}, the devices of each "
            f"{topology.chip.name}. A host has whole chips."
        )
    if group % per_host:
        raise ConfigError(
            f"{counted(group, 'device')} cannot fill hosts of {counted(per_host, 'device')}. Use a multiple of "
            f"{per_host}, or give another --{'devices_per_host' if topology else 'fake_devices'}."
        )
    return num_devices // per_host, per_host, shape


def _slice(topology: Topology, num_devices: int) -> tuple[int, ...]:
    shape = topology.slice_shape(num_devices)
    if not shape:
        most = topology.between_chips.devices or "any number"
        raise ConfigError(
            f"no slice of {topology.name} has {num_devices} devices (at most {most}). Take another --num_devices, or "
            "several equal slices with --num_slices."
        )
    return shape


def _devices_of_host(topology: Topology, num_devices: int, tpus: bool) -> int:
    if tpus and topology.hosts:
        per_chip = topology.chip.devices_per_chip
        return num_devices if num_devices <= topology.hosts.alone * per_chip else topology.hosts.devices * per_chip
    if tpus or not topology.gpus_per_host:
        raise ConfigError(
            f"topology {topology.name} does not say how many devices a host has. Give --devices_per_host, or add "
            f"{'[hosts]' if tpus else 'a first link that joins the devices of a host'} to its file."
        )
    return min(num_devices, topology.gpus_per_host)
