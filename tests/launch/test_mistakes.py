"""Mistakes in the command line of `launch` end with status 2 and one message."""

import pytest

from tests.programs import call

RUN = ("--config=gpt_tiny", "--topology=h100", "--num_devices=8", "--workdir=/shared/run")
TPU = ("--config=gpt_tiny", "--topology=tpu_v5e", "--num_devices=8", "--workdir=/shared/run")
TPU7X = ("--config=gpt_tiny", "--topology=tpu_7x", "--num_devices=8", "--workdir=/shared/run")
CPU = ("--config=gpt_tiny", "--num_devices=8", "--workdir=/shared/run")
POD = ("--image=image", "--volume_claim=claim")
LOCAL = ("local", "--processes=2", "--devices_per_process=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "an argument is missing, what starts the processes: slurm, jobset, mpi, ssh, local, task."),
        (["slrm", *RUN], "nothing is launched by 'slrm'. Did you mean 'slurm'?"),
        (["slurm"], "launch slurm needs --config and --topology and --num_devices and --workdir."),
        (["jobset", *RUN], "launch jobset needs --image and --volume_claim."),
        (["ssh", *RUN], "launch ssh needs --hosts."),
        (["slurm", *RUN, "--image=image"], "--image is not a flag of launch slurm, but of jobset."),
        (["slurm", *RUN, "--", "train"], "launch slurm takes no program after --; it starts train with --config."),
        (
            ["slurm", *RUN, "--num_devices=16"],
            "has 8 devices, and --num_devices=16. Set --config.mesh.data=4, or --num",
        ),
        (["slurm", *RUN, "--num_devices=6"], "Choose sizes with a product of 6, or --num_devices=8."),
        (["slurm", *RUN, "--workdir=run"], "--workdir=run is relative to the folder of each host. Give an absolute "),
        (["slurm", *RUN, "--workdir=/a b/run"], "--workdir='/a b/run/slurm-%j.log': an #SBATCH line may have"),
        (["slurm", *RUN, "--workdir=/"], "--workdir=/: a run needs a folder of its own, as in --workdir=/shared/run."),
        (["slurm", *RUN, "--workdir=/a b"], "the job's name 'a b' may have letters, digits and ._- only, and"),
        (
            ["slurm", *RUN, "--name=-x"],
            "the job's name '-x' may have letters, digits and ._- only, and begins with a le",
        ),
        (
            ["slurm", *RUN, "--time_limit=6"],
            "--time_limit=6 is 360 s and --grace_s=300: Slurm sends the signal to save",
        ),
        (["slurm", *RUN, "--time_limit=soon"], "--time_limit='soon': a limit of time is minutes, hours:minutes:sec"),
        (["slurm", *RUN, "--time_limit=5:59"], "--time_limit=5:59 is 359 s and --grace_s=300: Slurm sends the signal"),
        (
            ["slurm", *RUN, "--time_limit=0:05:30", "--grace_s=270"],
            "is 330 s and --grace_s=270: Slurm sends the signal",
        ),
        (["slurm", *RUN, "--time_limit=0-1", "--grace_s=4000"], "is 3600 s and --grace_s=4000: Slurm sends the signal"),
        (["slurm", *RUN, "--account=a\n#SBATCH --uid=0"], "--account='a\\n#SBATCH --uid=0': an #SBATCH line may have"),
        (["slurm", *RUN, "--processes_per_host=3"], "--processes_per_host=3 does not divide the 8 devices of a host."),
        (["slurm", *RUN, "--devices_per_host=3"], "8 devices cannot fill hosts of 3 devices."),
        (["slurm", *RUN, "--env=A"], "--env=A has no value. Write --env=NAME=VALUE."),
        (["slurm", *RUN, "--env=A B=1"], "--env: 'A B' is no name of a variable."),
        (["slurm", *RUN, "--fake_devices=2"], "--topology changes nothing beside --fake_devices, which is for hosts "),
        (
            ["slurm", "--fake_devices=3", *CPU],
            "8 devices cannot fill hosts of 3 devices. Use a multiple of 3, or give an",
        ),
        (["slurm", *TPU], "launch slurm is for GPUs and CPUs. Start slices of TPUs with launch jobset or launch ssh."),
        (
            ["jobset", *RUN, *POD, "--topology=trainium2"],
            "--topology=trainium2: its Trainium2 are neither TPUs nor GPUs of NVIDIA to fiddlex, for which alone ",
        ),
        (
            ["slurm", *RUN, "--topology=mi300x"],
            "its MI300X are neither TPUs nor GPUs of NVIDIA to fiddlex, for which alone there are job files. If they",
        ),
        (["mpi", *RUN, "--hosts=a,b"], "--hosts names 2 hosts, and the job needs 1: 8 × H100-SXM5-80GB on one host, "),
        (["mpi", *RUN, "--hosts=a", "--elastic"], "--elastic: mpirun ends all processes with the first."),
        (["ssh", *RUN, "--hosts=-oProxyCommand=x"], "--hosts: '-oProxyCommand=x' is no name of a host."),
        (["ssh", *RUN, "--devices_per_host=4", "--hosts=a,a"], "--hosts names a twice."),
        (["jobset", *RUN, *POD, "--name=Run"], "the job's name 'Run' must have at most 40 lower-case letters"),
        (
            ["jobset", *RUN, *POD, "--image=a b"],
            "--image='a b' must be the name of a container image, such as registry.",
        ),
        *(
            (["jobset", *RUN, *POD, f"--image={image}"], f"--image={image!r} must be the name of a container image")
            for image in ("https://x/y", "a//b", "a/", "a:", "a@", "a:b:c", "REG/Image", "a@sha256:00")
        ),
        (
            ["jobset", *RUN, *POD, "--queue=Team"],
            "--queue=Team must have at most 63 lower-case letters, digits, - and .",
        ),
        (["jobset", *RUN, *POD, "--num_slices=2"], "--num_slices=2: only TPUs come in slices. Leave it out."),
        (["jobset", *TPU, *POD, "--num_slices=3"], "--num_slices=3 does not divide --num_devices=8."),
        (["jobset", *TPU, *POD, "--num_slices=4"], "no slice of tpu_v5e has 2 devices (at most 256)."),
        (["jobset", *TPU7X, *POD, "--devices_per_host=1"], "--devices_per_host=1 is not a multiple of 2, the dev"),
        (["jobset", *TPU7X, *POD, "--num_slices=2"], "no slice of tpu_7x has 4 devices (at most 18432)."),
        (["jobset", *TPU, *POD, "--processes_per_host=2"], "--processes_per_host=2: a host of TPUs has one process."),
        (["jobset", *TPU, *POD, "--workdir=/a:b/run"], "--workdir=/a:b/run: its first folder, at which the volume is"),
        (["local", "--", "train"], "launch local needs --processes and --devices_per_process."),
        (["local", "--processes=0", "--", "train"], "--processes=0 must be at least 1."),
        (
            [*LOCAL, "train"],
            "'train' is one argument too many. A flag is written --name=value. A program and its flags come",
        ),
        ([*LOCAL], "no program is named. Name one of train, evaluate, generate, benchmark after --, as in -- train "),
        ([*LOCAL, "--"], "no program is named."),
        ([*LOCAL, "--", "fiddlex"], "no program is named."),
        ([*LOCAL, "--", "plan"], "'plan' is not a program that runs in several processes. Name one of train, "),
        (
            [*LOCAL, "--config.mesh.data=2", "--", "train"],
            "launch local has no config of its own. Put --config.section",
        ),
        (
            [*LOCAL, "--", "train", "--process_id=1"],
            "--process_id after --: launch gives the program this flag. Leav",
        ),
        ([*LOCAL, "--workdir=/a", "--", "train"], "--workdir is not a flag of launch local, but of slurm, jobset, mpi"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_mistakes(arguments: list[str], message: str) -> None:
    done = call("launch", *arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith("launch.py: ")
    assert message in done.stderr
