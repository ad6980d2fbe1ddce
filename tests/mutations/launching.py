"""Mutations of `fiddlex.launch`: job files and the processes that they start."""

from tests.mutations.mutation import Mutation

RUN = "tests/launch/test_scripts_run.py"
FILES = "tests/launch/test_job_files.py"
SHARES_GPUS = "tests/launch/test_runs.py::test_the_processes_of_a_host_share_its_gpus"

MUTATIONS = (
    Mutation(
        "gpus-for-which-nothing-compiles-taken-for-other-chips",
        "fiddlex/hardware/topology.py",
        old='kind.startswith(("NVIDIA ", "Tesla "))',
        new='kind.startswith("Tesla ")',
        tests=("tests/launch/test_job_files.py::test_clusters_take_manifests_of_all_topologies",),
    ),
    Mutation(
        "functions-in-phases-left-relative-in-job-files",
        "fiddlex/config/paths.py",
        old='return f"{_own_file(own[1])}{own[2]}" if own else text',
        new="return text",
        tests=("tests/launch/test_job_files.py::test_a_run_in_another_folder_finds_every_path",),
    ),
    Mutation(
        "chips-of-a-pod-counted-as-devices",
        "fiddlex/launch/jobset.py",
        old="job.devices_per_process // job.topology.chip.devices_per_chip",
        new="job.devices_per_process",
        tests=(f"{FILES}::test_a_pod_asks_for_chips_of_which_jax_makes_two_devices",),
    ),
    Mutation(
        "chips-of-a-title-counted-as-devices",
        "fiddlex/launch/job.py",
        old="{devices // per_chip} ×",
        new="{devices} ×",
        tests=(f"{FILES}::test_a_pod_asks_for_chips_of_which_jax_makes_two_devices",),
    ),
    Mutation(
        "chips-of-any-maker-taken-for-those-of-nvidia",
        "fiddlex/launch/job.py",
        old="if topology and not topology.platform:",
        new="if False:",
        tests=("tests/launch/test_mistakes.py::test_mistakes",),
    ),
    Mutation(
        "variables-of-a-command-replaced-by-kubernetes",
        "fiddlex/launch/jobset.py",
        old='return text.replace("$", "$$")',
        new="return text",
        tests=(f"{FILES}::test_kubernetes_reads_words_and_variables_as_they_are",),
    ),
    Mutation(
        "rule-of-a-jobset-by-a-name-that-clusters-refuse",
        "fiddlex/launch/jobset.py",
        old='"given_up"',
        new='"given-up"',
        tests=(f"{FILES}::test_clusters_take_manifests_of_all_topologies",),
    ),
    Mutation(
        "all-processes-of-a-host-on-the-same-gpus",
        "fiddlex/launch/programs.py",
        old="first = int(rank) * devices_per_process",
        new="first = 0",
        tests=(SHARES_GPUS,),
    ),
    Mutation(
        "a-program-of-the-current-folder-started",
        "fiddlex/launch/programs.py",
        old='"-P", "-m"',
        new='"-m"',
        tests=("tests/launch/test_runs.py::test_a_program_of_the_current_folder_is_not_taken_for_fiddlex",),
    ),
    Mutation(
        "a-flag-that-launch-gives-overridden",
        "fiddlex/launch/programs.py",
        old='if given & {name, f"no{name}"}:',
        new="if False:",
        tests=("tests/launch/test_runs.py::test_flags_that_launch_gives_are_refused",),
    ),
    Mutation(
        "gpus-by-the-rank-among-all-processes",
        "fiddlex/launch/programs.py",
        old='"SLURM_LOCALID"',
        new='"SLURM_PROCID"',
        tests=(SHARES_GPUS,),
    ),
    Mutation(
        "a-cancelled-job-requeued",
        "fiddlex/launch/slurm.py",
        old=' && $(squeue --noheader --job="$job" --format=%T) == RUNNING',
        new="",
        tests=(f"{RUN}::test_slurm_requeues_a_job_that_has_saved",),
    ),
    Mutation(
        "a-run-that-saved-after-sigusr1-not-requeued",
        "fiddlex/launch/slurm.py",
        old="@(138|140|143)",
        new="143",
        tests=(f"{RUN}::test_slurm_requeues_a_job_that_has_saved",),
    ),
    Mutation(
        "a-whole-array-requeued-for-one-of-its-runs",
        "fiddlex/launch/slurm.py",
        old="job=${job:-$SLURM_JOB_ID}",
        new="job=$SLURM_JOB_ID",
        tests=(f"{RUN}::test_slurm_requeues_a_run_of_an_array_alone",),
    ),
    Mutation(
        "requeued-by-the-status-of-tasks-that-were-lost",
        "fiddlex/launch/slurm.py",
        old='status=$(<"$FIDDLEX_STATUS_FILE")',
        new=":",
        tests=(f"{RUN}::test_slurm_goes_by_the_status_of_the_run",),
    ),
    Mutation(
        "status-of-the-run-from-any-task",
        "fiddlex/launch/programs.py",
        old=' and environment.get("SLURM_PROCID") == "0"',
        new="",
        tests=("tests/launch/test_runs.py::test_the_first_task_leaves_the_status_of_the_run",),
    ),
    Mutation(
        "tasks-that-ssh-started-outlive-a-killed-script",
        "fiddlex/launch/ssh.py",
        old="    } 9>&- &",
        new="    } &",
        tests=(f"{RUN}::test_over_ssh_the_tasks_of_a_killed_script_end",),
    ),
    Mutation(
        "tasks-of-mpirun-ended-by-its-signal",
        "fiddlex/launch/mpi.py",
        old='(trap "" USR1; exec',
        new="(exec",
        tests=(f"{RUN}::test_a_notice_reaches_all_tasks_and_their_status_comes_back",),
    ),
    Mutation(
        "words-after-two-dashes-as-the-programs-own",
        "fiddlex/terminal/arguments.py",
        old="flags.FLAGS.read_flags_from_files(split_program(argv)[0])",
        new="flags.FLAGS.read_flags_from_files([word for word in argv if word != '--'])",
        tests=("tests/launch/test_mistakes.py::test_mistakes",),
    ),
    Mutation(
        "a-run-that-sigusr2-kills",
        "fiddlex/terminal/interrupts.py",
        old="ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)",
        new="ENDING = (signal.SIGTERM, signal.SIGUSR1)",
        tests=("tests/train/test_stop_signals.py::test_the_first_signal_is_received_and_handlers_are_put_back",),
    ),
    Mutation(
        "folder-with-another-name-taken-for-a-checkpoint",
        "fiddlex/files/places.py",
        old="return name.isdecimal() and name == str(int(name))",
        new="return name.isdecimal()",
        tests=("tests/launch/test_supervisor.py::test_only_folders_that_the_trainer_reads_are_checkpoints",),
    ),
    Mutation(
        "a-time-limit-that-leaves-no-time-to-train",
        "fiddlex/launch/slurm.py",
        old="if 0 < seconds <= grace_s + _EARLIEST_S:",
        new="if False:",
        tests=("tests/launch/test_mistakes.py",),
    ),
)
