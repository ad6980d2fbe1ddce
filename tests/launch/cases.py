"""The job files of `tests/launch/golden`, by the command lines that make them.

python -m tests.launch.cases    # writes them again, after a change that is meant; read the difference
"""

import pathlib
import subprocess
import sys

GOLDEN = pathlib.Path(__file__).parent / "golden"
_PLAIN = ("--config=gpt_tiny", "--workdir=/shared/run", "--python=python")
CASES = {
    "slurm_gpu.sh": ("slurm", *_PLAIN, "--topology=h100", "--num_devices=16", "--config.mesh.data=4"),
    "slurm_options.sh": (
        *("slurm", *_PLAIN, "--topology=a100_80", "--num_devices=8", "--elastic", "--processes_per_host=2"),
        *("--partition=gpu", "--account=me", "--qos=low", "--time_limit=1-00:00:00", "--cpus_per_task=12"),
        *("--grace_s=120", "--max_restarts=5", "--name=tiny", "--env=NCCL_DEBUG=INFO", "--env=GREETING=it's $HOME"),
    ),
    "slurm_cpu.sh": (*("slurm", *_PLAIN, "--fake_devices=2", "--processes_per_host=2", "--num_devices=8"),),
    "mpi_gpu.sh": (
        *("mpi", *_PLAIN, "--topology=h100", "--num_devices=16", "--config.mesh.data=4"),
        *("--hosts=node0,node1", "--processes_per_host=2", "--env=NCCL_DEBUG=INFO"),
    ),
    "ssh_gpu.sh": (
        *("ssh", *_PLAIN, "--topology=h100", "--num_devices=16", "--config.mesh.data=4", "--hosts=me@node0,me@node1"),
        *("--processes_per_host=2", "--env=GREETING=it's $HOME"),
    ),
    "ssh_tpu.sh": (
        *("ssh", *_PLAIN, "--topology=tpu_v4", "--num_devices=8", "--hosts=node0,node1", "--elastic"),
        *("--config.data.source=text:/shared/a file",),
    ),
    "jobset_gpu.yaml": (
        *("jobset", *_PLAIN, "--topology=h100", "--num_devices=16", "--config.mesh.data=4", "--image=registry/image:1"),
        *("--volume_claim=claim", "--env=GREETING=it's $HOME: 1", "--queue=team-a"),
    ),
    "jobset_tpu.yaml": (
        *("jobset", *_PLAIN, "--topology=tpu_v5e", "--num_devices=8", "--image=image", "--volume_claim=claim"),
    ),
    "jobset_two_slices.yaml": (
        *("jobset", *_PLAIN, "--topology=tpu_v5p", "--num_devices=32", "--config.mesh.data=8", "--num_slices=2"),
        *("--image=image", "--volume_claim=claim", "--config.data.global_batch_size=32"),
    ),
}

if __name__ == "__main__":
    for name, arguments in CASES.items():
        text = subprocess.run(
            [sys.executable, "-m", "fiddlex", "launch", *arguments], stdout=subprocess.PIPE, check=True
        )
        (GOLDEN / name).write_bytes(text.stdout)
