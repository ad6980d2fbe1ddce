"""Job files: what they contain, that shells and Kubernetes read them, and that odd strings arrive as they are."""

import math
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fiddlex.config import Config
from fiddlex.config.config import PATHS
from fiddlex.config.overrides import replaced
from fiddlex.config.paths import made_absolute
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import catalogue, load_topology
from fiddlex.launch.job import Job, Options, make_job
from fiddlex.launch.jobset import JobSetOptions, jobset_manifest
from fiddlex.launch.shell import assignments, command_line
from fiddlex.launch.slurm_site import save_time_warning
from tests.launch.cases import CASES, GOLDEN
from tests.launch.jobset_rules import refusals
from tests.programs import call

SCRIPTS = [name for name in CASES if name.endswith(".sh")]
MANIFESTS = [name for name in CASES if name.endswith(".yaml")]


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
def test_clusters_take_the_manifests(name: str) -> None:
    manifest = yaml.safe_load((GOLDEN / name).read_text())
    assert refusals(manifest) == []
    (replicated,) = manifest["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
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
    on_hosts = "one host" if hosts == 1 else f"{hosts} hosts"
    title = f"# {num_devices // 2} × TPU7x ({num_devices} devices) on {on_hosts}, one process per host."
    assert made.splitlines()[0] == title
    (replicated,) = yaml.safe_load(made)["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == hosts
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    labels = {"cloud.google.com/gke-tpu-accelerator": "tpu7x", "cloud.google.com/gke-tpu-topology": shape}
    assert pod["nodeSelector"] == labels


@pytest.mark.parametrize("topology", sorted({*catalogue()} - {"mi300x", "trainium2"}))
@pytest.mark.parametrize("num_chips", [4, 16, 256])
def test_clusters_take_manifests_of_all_topologies(topology: str, num_chips: int) -> None:
    config, num_devices = Config(), num_chips * load_topology(topology).chip.devices_per_chip
    config.mesh.data = num_devices
    options = Options(python="python", name="n" * 40)
    job = make_job(
        config,
        ["train"],
        topology=load_topology(topology),
        num_devices=num_devices,
        workdir="/shared/run",
        options=options,
    )
    manifest = jobset_manifest(job, JobSetOptions("image", "claim", port=1, queue="q" * 63))
    assert refusals(yaml.safe_load(manifest)) == []


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        (["spec", "failurePolicy", "rules", 0, "name"], "given-up", "may have letters, digits, _ , and : only"),
        (["spec", "failurePolicy", "rules", 0, "name"], "evicted", "two rules have the name evicted"),
        (["spec", "failurePolicy", "rules", 0, "onJobFailureReasons"], ["Other"], "Other is no reason"),
        (["spec", "failurePolicy", "restartStrategy"], "Restart", "'Restart' is none of"),
        (["spec", "restarts"], 1, "$.spec has no field restarts"),
        (["metadata", "name"], "n" * 50, "is no label of DNS"),
        (["spec", "replicatedJobs", 0, "template", "spec", "backofLimit"], 0, "backofLimit"),
    ],
)
def test_a_manifest_that_clusters_refuse(path: list[str | int], value: object, refusal: str) -> None:
    manifest = yaml.safe_load((GOLDEN / "jobset_gpu.yaml").read_text())
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert refusal in "\n".join(refusals(manifest))


@pytest.mark.parametrize(
    ("status", "message", "action"),
    [
        ("PodFailurePolicy", "Pod a/run-host-0-0-x has condition DisruptionTarget matching FailJob rule at index 0", 1),
        (
            "PodFailurePolicy",
            "Container train for pod a/run-host-0-1-x failed with exit code 143 matching FailJob rule at index 1",
            1,
        ),
        (
            "PodFailurePolicy",
            "Container train for pod a/run-host-0-1-x failed with exit code 137 matching FailJob rule at index 1",
            None,
        ),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", 0),
    ],
)
def test_which_rule_a_failed_job_meets(status: str, message: str, action: int | None) -> None:
    manifest = yaml.safe_load((GOLDEN / "jobset_gpu.yaml").read_text())
    rules = manifest["spec"]["failurePolicy"]["rules"]
    met = [
        index
        for index, rule in enumerate(rules)
        if status in rule["onJobFailureReasons"]
        and any(re.search(each, message) for each in rule.get("onJobFailureMessagePatterns", [""]))
    ]
    assert met == ([] if action is None else [action])
    assert [rule["action"] for rule in rules] == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]


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


def test_paths_are_made_absolute(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fiddlex.config import Config\ndef get_config(depth):\n    return Config()\n"
    )
    arguments = ["--config=mine.py:a b", "--topology=h100", "--num_devices=1", "--workdir=/shared/run"]
    (tmp_path / "rule.py").write_text("def rule(*, config):\n    ...\nrule.moments = 0\n")
    paths = ["data.source=text:it's", "data.eval_source=text:/held", "optimizer.name=rule.py:rule"]
    fields = [f"--config.{each}" for each in [*paths, "optimizer.zero1"]]
    done = call("launch", "slurm", *arguments, *fields, cwd=tmp_path)
    assert f"'--config={tmp_path}/mine.py:a b'" in done.stdout
    assert f"""'--config.data.source=text:{tmp_path}/it'"'"'s'""" in done.stdout
    assert "--config.data.eval_source=text:/held" in done.stdout
    assert f"--config.optimizer.name={tmp_path}/rule.py:rule" in done.stdout
    assert "--config.optimizer.zero1=True" in done.stdout


@pytest.mark.parametrize("name", PATHS)
def test_a_run_in_another_folder_finds_every_path(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = {
        "data.source": ("megatron:0.5:a,0.5:b", f"megatron:0.5:{tmp_path}/a,0.5:{tmp_path}/b"),
        "data.eval_source": ("text:a", f"text:{tmp_path}/a"),
        "train.topology": ("a.toml", f"{tmp_path}/a.toml"),
        "train.init_from": ("hf:a", f"hf:{tmp_path}/a"),
        "pipeline.schedule": ("file:a.csv", f"file:{tmp_path}/a.csv"),
        "pipeline.semantics": ("a.py:f", f"{tmp_path}/a.py:f"),
        "pipeline.semantics_schedule": ("sync:100,a.py:f:0.5,2bw", f"sync:100,{tmp_path}/a.py:f:0.5,2bw"),
        "optimizer.name": ("a.py:f", f"{tmp_path}/a.py:f"),
        "optimizer.schedule": ("a.py:f", f"{tmp_path}/a.py:f"),
    }
    relative, absolute = written.get(name, ("a", f"{tmp_path}/a"))
    assert made_absolute(replaced(Config(), {name: relative})) == {name: absolute}
    assert made_absolute(replaced(Config(), {name: absolute})) == {}


SCONTROL = r"""#!/bin/bash
case $* in
    *config*) printf 'InactiveLimit = 0 sec\nKillWait                = 30 sec\n' ;;
    *low*) echo 'PartitionName=low AllowGroups=ALL Default=NO GraceTime=120 Hidden=NO' ;;
    *) printf 'PartitionName=%s Default=%s GraceTime=%s Hidden=NO\n' low NO 120 main YES 5 ;;
esac
"""


@pytest.mark.parametrize(
    ("partition", "grace_s", "told"),
    [
        ("", 31, "has KillWait=30 s to save; before it preempts one of partition main, GraceTime=5 s more."),
        ("low", 31, "has KillWait=30 s to save; before it preempts one of partition low, GraceTime=120 s more."),
        ("low", 30, ""),
    ],
)
def test_the_time_that_slurm_gives_is_told(
    partition: str, grace_s: int, told: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    warning = save_time_warning(partition, grace_s)
    assert told in warning
    assert bool(told) == bool(warning)
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho 'no controller' >&2; exit 1\n")
    assert save_time_warning(partition, grace_s) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such table")
def test_the_kernels_name_of_a_process_has_no_blank(tmp_path: pathlib.Path) -> None:
    text = "import pathlib\nfrom fiddlex.config import Config\n\n\ndef get_config():\n"
    text += "    pathlib.Path(__file__).with_name('name').write_text(pathlib.Path('/proc/self/comm').read_text())\n"
    (tmp_path / "mine.py").write_text(text + "    return Config()\n")
    arguments = ["--topology=h100", "--num_devices=1", "--workdir=/shared/run", f"--config={tmp_path}/mine.py"]
    call("fiddlex", "launch", "slurm", *arguments)
    assert (tmp_path / "name").read_text() == "fiddlex-launch\n"
