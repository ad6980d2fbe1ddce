"""Job files for Kubernetes: the manifest of a JobSet (jobset.x-k8s.io/v1alpha2), with a pod for each process.

On TPUs, GKE tells each pod of the others, and jax finds the processes. On GPUs the manifest names the first pod, whose
name the JobSet's headless service resolves, and each pod takes its rank from its index. A pod that Kubernetes evicts
saves together with all others; all end with status 143, and the JobSet starts all pods again, however often that
happens. When a pod is killed otherwise, it starts them again `max_restarts` times. It does not when a supervisor has
given up (status 1) or the config has a mistake (status 2).

JobSet's release 0.10 is the first that tells evictions from other failures, by what the failed Job says of its end.
"""

import dataclasses
import json
import pathlib
import re
from typing import Any

import yaml

from fiddlex.errors import ConfigError
from fiddlex.launch.job import Job

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"  # of a name's path
_IMAGE = re.compile(  # host and port, path, tag, digest
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?"
    r"(?:@sha256:[0-9a-f]{64})?"
)
_LONGEST_OBJECT = 253
_LONGEST_QUEUE = 63  # of the value of a label
_LONGEST = 40  # of 63 characters of a pod's name; indices and the names of its jobs take the others
_TPU_PORTS = (8471, 8482, 8080)  # of libtpu, of jax's coordinator, and between slices
_CONTAINER = "train"
_FAILED, _MISUSED = 1, 2  # the statuses with which a supervisor does not want to be started again
_STOPPED = 143  # the status after SIGTERM and a save
# The messages of a Job of which a pod was evicted, in the words of Kubernetes' Job controller: it names the pod that
# ended first, which is the evicted one, or one that saved together with it.
_EVICTED = ("has condition DisruptionTarget", f"failed with exit code {_STOPPED} ")


@dataclasses.dataclass(frozen=True)
class JobSetOptions:
    """What Kubernetes has to know."""

    image: str  # the container image, which has fiddlex
    volume_claim: str  # claim of a volume that all pods share, mounted at the first folder of the workdir's path
    port: int  # the coordinator's port, for GPUs
    queue: str = ""  # Kueue's queue that admits the job; empty: none


def jobset_manifest(job: Job, options: JobSetOptions) -> str:
    """The manifest, in YAML."""
    if job.options.elastic:
        raise ConfigError(
            "--elastic: a JobSet starts all its pods anew when one fails. Use launch slurm or launch ssh."
        )
    if not _NAME.fullmatch(job.name) or len(job.name) > _LONGEST:
        raise ConfigError(
            f"the job's name {job.name!r} must have at most {_LONGEST} lower-case letters, digits and -, from a letter "
            "to a letter or digit. Give one with --name."
        )
    _check_name("volume_claim", options.volume_claim, longest=_LONGEST_OBJECT)
    if not _IMAGE.fullmatch(options.image):
        raise ConfigError(
            f"--image={options.image!r} must be the name of a container image, such as registry.example/team/image:1: "
            "a path of lower-case words, with the registry before it, a tag or a digest (@sha256:…) behind it, and "
            "without https://."
        )
    if options.queue:
        _check_name("queue", options.queue, longest=_LONGEST_QUEUE)
    replicated = {"name": "slice" if job.runs_on_tpus else "host", "replicas": job.options.num_slices}
    failure_policy = {
        "maxRestarts": job.options.max_restarts,
        "restartStrategy": "BlockingRecreate",  # no pod starts while one of before still saves into the workdir
        "rules": [
            {
                "name": "given_up",  # JobSet takes no hyphen here
                "action": "FailJobSet",
                "onJobFailureReasons": ["BackoffLimitExceeded"],
            },
            {
                "name": "evicted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [*_EVICTED],
            },
        ],
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, options.queue),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": failure_policy,
            "replicatedJobs": [replicated | {"template": {"spec": _job(job, options)}}],
        },
    }
    try:
        json.dumps(manifest, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("the command has characters that are not UTF-8, which YAML cannot have.") from None
    # Characters that are not ASCII are escaped: readers of YAML fold some of them, such as U+0085, as ends of lines.
    text = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return f"# {job.title}.\n# Made by fiddlex launch. To start it: kubectl apply -f THIS_FILE.\n{text}"


def _check_name(flag: str, name: str, *, longest: int) -> None:
    if not _OBJECT.fullmatch(name) or len(name) > longest:
        raise ConfigError(
            f"--{flag}={name} must have at most {longest} lower-case letters, digits, - and ., as names of Kubernetes."
        )


def _metadata(job: Job, queue: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    if job.runs_on_tpus:  # a slice is a node pool, which one Job of the set has for itself
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
    return metadata


def _job(job: Job, options: JobSetOptions) -> dict[str, Any]:
    pods = job.num_processes // job.options.num_slices
    exit_codes = {"containerName": _CONTAINER, "operator": "NotIn", "values": [_FAILED, _MISUSED]}
    return {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,  # a failure that no rule names ends the Job at once, for BackoffLimitExceeded
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": exit_codes},
            ]
        },
        "template": {"spec": _pod(job, options)},
    }


def _pod(job: Job, options: JobSetOptions) -> dict[str, Any]:
    assert job.topology  # which only job files for hosts without accelerators lack
    root = _mount_path(job.workdir)
    resource = "google.com/tpu" if job.runs_on_tpus else "nvidia.com/gpu"
    environment = dict(job.options.environment)
    ports = _TPU_PORTS if job.runs_on_tpus else (options.port,)
    train_flags: list[str] = []
    mounts = [{"name": "workdir", "mountPath": root}]
    volumes: list[dict[str, Any]] = [
        {"name": "workdir", "persistentVolumeClaim": {"claimName": options.volume_claim}},
    ]
    selector: dict[str, Any] = {}
    if job.runs_on_tpus:
        selector = {"nodeSelector": _tpu_labels(job)}
    else:
        environment |= {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(job.devices_per_process)))}
        train_flags = [
            f"--coordinator_address={job.name}-host-0-0.{job.name}:{options.port}",
            f"--num_processes={job.num_processes}",
        ]
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # NCCL's, inside a host
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    command = [_literal(word) for word in job.task(train_flags=train_flags, python="python")]
    if not job.runs_on_tpus:
        command.append("--process_id=$(JOB_COMPLETION_INDEX)")
    container = {
        "name": _CONTAINER,
        "image": options.image,
        "command": command,
        "env": [{"name": name, "value": _literal(value)} for name, value in environment.items()],
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"limits": {resource: job.devices_per_process // job.topology.chip.devices_per_chip}},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.options.grace_s,
        **selector,
        "containers": [container],
        "volumes": volumes,
    }


def _tpu_labels(job: Job) -> dict[str, str]:
    assert job.topology
    if job.topology.hosts is None:
        raise ConfigError(f"topology {job.topology.name} has no name of GKE's for its chips: add [hosts] to its file.")
    return {
        "cloud.google.com/gke-tpu-accelerator": job.topology.hosts.accelerator,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.slice_shape)),
    }


def _mount_path(workdir: str) -> str:
    first = pathlib.PurePosixPath(workdir).parts[1:2]
    if not first or ":" in first[0]:
        raise ConfigError(
            f"--workdir={workdir}: its first folder, at which the volume is mounted, must have a name without a colon."
        )
    return f"/{first[0]}"


def _literal(text: str) -> str:
    """`text` as Kubernetes reads it literally: it replaces `$(NAME)`, and `$$` by `$`."""
    return text.replace("$", "$$")
