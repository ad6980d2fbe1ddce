"""Job files: what they contain, that shells and Kubernetes read them, and that odd strings arrive as they are."""

import math
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fiddlex.cluster.topology import load_topology
from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.launch.job import Job, Options, make_job
from fiddlex.launch.jobset import JobSetOptions, jobset_manifest
from fiddlex.launch.shell import assignments, command_line
from tests.launch.cases import CASES, GOLDEN
from tests.programs import call

SCRIPTS = [name for name in CASES if name.endswith(".sh")]
MANIFESTS = [name for name in CASES if name.endswith(".yaml")]
# Of the CRD of jobset.x-k8s.io/v1alpha2 and of Kubernetes' Job and Pod, what a manifest may use: the type of each
# field, `!` where it is required, and lists of one element.
SCHEMA = {
    "apiVersion!": "jobset.x-k8s.io/v1alpha2",
    "kind!": "JobSet",
    "metadata!": {"name!": str, "annotations": dict},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name!": str, "action!": "FailJobSet", "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [
            {
                "name!": str,
                "replicas": int,
                "template!": {
                    "spec!": {
                        "completionMode": "Indexed",
                        "parallelism": int,
                        "completions": int,
                        "backoffLimit": int,
                        "podFailurePolicy": {
                            "rules!": [
                                {
                                    "action!": "FailJob",
                                    "onPodConditions": [{"type!": str, "status!": str}],
                                    "onExitCodes": {"containerName": str, "operator!": "NotIn", "values!": [int]},
                                }
                            ]
                        },
                        "template!": {
                            "spec!": {
                                "restartPolicy": "Never",  # a podFailurePolicy requires it
                                "terminationGracePeriodSeconds": int,
                                "nodeSelector": dict,
                                "containers!": [
                                    {
                                        "name!": str,
                                        "image": str,
                                        "command": [str],
                                        "env": [{"name!": str, "value": str}],
                                        "ports": [{"containerPort!": int}],
                                        "resources": {"limits": dict},
                                        "volumeMounts": [{"name!": str, "mountPath!": str}],
                                    }
                                ],
                                "volumes": [
                                    {
                                        "name!": str,
                                        "persistentVolumeClaim": {"claimName!": str},
                                        "emptyDir": {"medium": str},
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def check(value: Any, schema: Any, where: str = "") -> None:
    """Asserts that a value of YAML has the form of the schema."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        names = {name.rstrip("!"): rule for name, rule in schema.items()}
        assert value.keys() <= names.keys(), (where, value.keys() - names.keys())
        assert {name[:-1] for name in schema if name.endswith("!")} <= value.keys(), where
        for name, inner in value.items():
            check(inner, names[name], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for inner in value:
            check(inner, schema[0], f"{where}[]")
    elif isinstance(schema, type):
        assert type(value) is schema, (where, value)
    else:
        assert value == schema, where


def make(train: list[str], *, workdir: str = "/shared/run", **options: Any) -> Job:
    config, chosen = Config(), Options(python="python", **options)
    config.mesh.data = 16
    return make_job(config, train, topology=load_topology("h100"), num_devices=16, workdir=workdir, options=chosen)


@pytest.mark.parametrize("name", CASES)
def test_job_files(name: str) -> None:
    assert call("launch", *CASES[name]).stdout == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_shells_read_the_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", GOLDEN / name], check=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_the_form_of_a_jobset(name: str) -> None:
    manifest = yaml.safe_load((GOLDEN / name).read_text())
    check(manifest, SCHEMA)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The longest name of a pod is a label of DNS.
    assert len(f"{'n' * 40}-{replicated['name']}-999-9999-12345") <= 63
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    if "nodeSelector" in pod:  # the pods of a slice hold its chips
        edges = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = replicated["template"]["spec"]["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
        assert math.prod(map(int, edges)) == chips


@pytest.mark.parametrize(("num_devices", "hosts", "shape"), [(8, 1, "2x2x1"), (32, 4, "2x2x4")])
def test_a_pod_asks_for_chips_of_which_jax_makes_two_devices(num_devices: int, hosts: int, shape: str) -> None:
    flags = ("--config=gpt_tiny", "--workdir=/shared/run", "--image=image", "--volume_claim=claim")
    mesh = f"--config.mesh.data={num_devices // 4}", "--config.data.global_batch_size=64"
    made = call("launch", "jobset", *flags, "--topology=tpu_7x", f"--num_devices={num_devices}", *mesh).stdout
    (replicated,) = yaml.safe_load(made)["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == hosts
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    labels = {"cloud.google.com/gke-tpu-accelerator": "tpu7x", "cloud.google.com/gke-tpu-topology": shape}
    assert pod["nodeSelector"] == labels


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(TEXT, min_size=1, max_size=3), TEXT)
def test_bash_reads_words_and_variables_as_they_are(words: list[str], value: str) -> None:
    line = command_line(["printf", "%s\\0", *words], task=["--", *words])
    script = "\n".join([*assignments({"VALUE": value}), line, 'printf "%s" "$VALUE"'])
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in [*words, "--", *words]) + value


def expanded(text: str) -> str:
    """What Kubernetes makes of a command's word where no variable is defined but RANK."""
    return text.replace("$$", "\0").replace("$(RANK)", "3").replace("\0", "$")


@example("\x85", "\x85")
@given(TEXT, TEXT)
def test_kubernetes_reads_words_and_variables_as_they_are(word: str, value: str) -> None:
    job = make(["train", f"--config={word}$(RANK)$$x"], environment={"VALUE": value})
    manifest = yaml.safe_load(jobset_manifest(job, JobSetOptions("image", "claim", 1)))
    (replicated,) = manifest["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert f"--config={word}$(RANK)$$x" in map(expanded, container["command"])
    assert container["command"][-1] == "--process_id=$(JOB_COMPLETION_INDEX)"
    assert expanded(container["env"][0]["value"]) == value


def test_kubernetes_takes_only_utf_8() -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        jobset_manifest(make(["train", "--config=\udc80"]), JobSetOptions("image", "claim", 1))


def test_a_file_is_written_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "jobs" / "run.sh"
    for _ in range(2):  # the same text again changes nothing
        assert call("launch", *CASES["slurm_gpu.sh"], f"--write={path}").stdout == ""
        assert path.read_text() == (GOLDEN / "slurm_gpu.sh").read_text()
    assert path.stat().st_mode & 0o111 == 0o111
    other = call("launch", *CASES["slurm_options.sh"], f"--write={path}", status=2)
    assert f"--write={path} is there already, with other text. Name another file, or remove it." in other.stderr
    assert path.read_text() == (GOLDEN / "slurm_gpu.sh").read_text()


def test_the_path_of_a_config_file_is_made_absolute(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fiddlex.config import Config\ndef get_config(depth):\n    return Config()\n"
    )
    arguments = ["--config=mine.py:a b", "--topology=h100", "--num_devices=1", "--workdir=/shared/run"]
    done = call(
        "launch", "slurm", *arguments, "--config.data.source=text:it's", "--config.optimizer.zero1", cwd=tmp_path
    )
    assert f"'--config={tmp_path}/mine.py:a b'" in done.stdout
    assert """'--config.data.source=text:it'"'"'s'""" in done.stdout
    assert "--config.optimizer.zero1=True" in done.stdout
