"""Mutations of the command line: `fiddlex.commands`, `fiddlex.completion`, configs by name, Weights & Biases."""

from tests.mutations.mutation import Mutation

FILES = "fiddlex/config/files.py"
TEST_FILES = "tests/config/test_files.py"
METRICS = "fiddlex/train/run/records/metrics.py"
WANDB = "fiddlex/train/run/records/wandb_run.py"
TEST_WANDB = "tests/train/run/records/test_wandb_run.py"

MUTATIONS = (
    Mutation(
        "names-of-configs-before-files",
        FILES,
        old="if os.path.isfile(named):",
        new="if os.path.isfile(named) and named not in config_names():",
        tests=(f"{TEST_FILES}::test_a_file_that_exists_goes_before_a_name",),
    ),
    Mutation(
        "configs-of-the-checkout-in-an-installed-package",
        FILES,
        old='return installed if installed.is_dir() else package.parent / "configs"',
        new='return package.parent / "configs"',
        tests=(f"{TEST_FILES}::test_the_configs_of_an_installed_package_are_those_beside_its_modules",),
    ),
    Mutation(
        "arguments-of-configs-unchecked",
        FILES,
        old="is_taken = argument in contents.get(_ARGUMENTS, (argument,))",
        new="is_taken = bool(argument) or argument in contents.get(_ARGUMENTS, (argument,))",
        tests=(f"{TEST_FILES}::test_mistakes",),
    ),
    Mutation(
        "command-with-its-own-name-as-an-argument",
        "fiddlex/__main__.py",
        old='sys.argv = [f"fiddlex {name}", *arguments]',
        new='sys.argv = [f"fiddlex {name}", name, *arguments]',
        tests=("tests/test_command.py::test_a_command_is_the_same_program_as_its_script",),
    ),
    Mutation(
        "completion-of-all-fields-with-the-flags",
        "fiddlex/completion.py",
        old="            found = flags_alone",
        new="            pass",
        tests=("tests/test_completion.py::test_candidates",),
    ),
    Mutation(
        "completion-without-the-equals-sign",
        "fiddlex/completion.py",
        old='flag if flag in switches else f"{flag}="',
        new="flag",
        tests=("tests/test_completion.py::test_candidates",),
    ),
    Mutation(
        "steps-written-twice-at-wandb",
        METRICS,
        old='not (record["step"] <= self._wandb_run.written_step and _key(record) in self._dropped)',
        new="True",
        tests=(f"{TEST_WANDB}::test_a_resumed_run_goes_on_without_writing_a_step_twice",),
    ),
    Mutation(
        "evaluations-left-out-at-wandb-where-a-step-was-trained-again",
        METRICS,
        old='return record["step"], frozenset(record)',
        new='return record["step"], frozenset()',
        tests=(f"{TEST_WANDB}::test_a_resumed_run_goes_on_without_writing_a_step_twice",),
    ),
    Mutation(
        "resumed-run-is-another-run-at-wandb",
        WANDB,
        old="self._id = known or secrets.token_hex(4)",
        new="self._id = secrets.token_hex(4)",
        tests=(f"{TEST_WANDB}::test_a_resumed_run_goes_on_without_writing_a_step_twice",),
    ),
    Mutation(
        "failure-of-wandb-ends-the-run",
        WANDB,
        old="""            action(self._run)
        except Exception as error:""",
        new="""            action(self._run)
        except ZeroDivisionError as error:""",
        tests=(f"{TEST_WANDB}::test_no_failure_stops_the_run",),
    ),
)
