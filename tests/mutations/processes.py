"""Mutations of what watches the processes of a run: the coordinator, elastic runs, the supervisor."""

from tests.mutations.mutation import Mutation

MEETING = "tests/cluster/test_rendezvous.py"
ELASTIC = "tests/cluster/test_elastic.py"
SUPERVISOR = "tests/launch/test_supervisor.py"

MUTATIONS = (
    Mutation(
        "a-closed-connection-overlooked",
        "fiddlex/cluster/coordinator.py",
        old="                self._lost([process], silent_s=None)",
        new="                pass",
        tests=(f"{MEETING}::test_a_lost_process_is_reported_by_one_of_the_others",),
    ),
    Mutation(
        "gloo-at-the-address-of-the-hosts-name",
        "fiddlex/cluster/addresses.py",
        old="_jax.make_gloo_tcp_collectives(client, hostname=address)",
        new="_jax.make_gloo_tcp_collectives(client, hostname=None)",
        tests=("tests/cluster/test_addresses.py::test_gloo_listens_at_the_address",),
    ),
    Mutation(
        "one-attempt-to-connect-for-the-whole-time",
        "fiddlex/cluster/rendezvous.py",
        old="min(deadline - time.monotonic(), _SILENT_S)",
        new="deadline - time.monotonic()",
        tests=(f"{MEETING}::test_no_attempt_to_connect_lasts_long",),
    ),
    Mutation(
        "a-host-that-was-cut-off-refused",
        "fiddlex/cluster/coordinator.py",
        old="there.heard_s > SUSPECTED_S",
        new="there.heard_s > SUSPECTED_S + 60",
        tests=(f"{MEETING}::test_a_host_that_was_cut_off_comes_back_before_it_counts_as_lost",),
    ),
    Mutation(
        "ranks-of-an-elastic-run-taken-for-process-ids",
        "fiddlex/cluster/coordinator.py",
        old="each.process_id == process.process_id",
        new="each.rank == process.process_id",
        tests=(f"{MEETING}::test_a_host_that_comes_back_waits_though_others_have_new_ranks",),
    ),
    Mutation(
        "stop-after-the-first-proposal",
        "fiddlex/cluster/coordinator.py",
        old="if len(known) == len(steps):",
        new="if known:",
        tests=(f"{MEETING}::test_all_agree_on_the_step_to_stop_after",),
    ),
    Mutation(
        "a-failed-collective-reported-at-once",
        "fiddlex/cluster/coordinator.py",
        old='if not value["collective"]:',
        new="if True:",
        tests=(f"{MEETING}::test_a_failed_collective_waits_for_signs_of_life_of_all",),
    ),
    Mutation(
        "a-smaller-run-keeps-its-microbatches",
        "fiddlex/cluster/elastic.py",
        old="itertools.count(first)",
        new="itertools.count(before)",
        tests=(f"{ELASTIC}::test_sizes_and_microbatches",),
    ),
    Mutation(
        "restarts-that-gain-nothing-forever",
        "fiddlex/launch/supervisor.py",
        old="gained = saved > before",
        new="gained = True",
        tests=(f"{SUPERVISOR}::test_starts_that_gain_nothing_end_it",),
    ),
    Mutation(
        "an-elastic-run-ended-by-a-stop-of-one-host",
        "fiddlex/launch/supervisor.py",
        old="if stopped and not self._limits.elastic and",
        new="if stopped and",
        tests=(f"{SUPERVISOR}::test_a_stop_that_another_host_was_asked_for",),
    ),
    Mutation(
        "workdirs-of-the-ranks-not-compared",
        "fiddlex/train/trainer.py",
        old='"the workdir": workdir and str(workdir),',
        new="",
        tests=(
            "tests/cluster/test_processes.py::test_another_config_or_workdir_on_one_rank_ends_all_with_one_message",
        ),
    ),
    Mutation(
        "a-coordinator-ended-by-the-signal-to-save",
        "fiddlex/cluster/coordinator.py",
        old="signal.signal(number, signal.SIG_IGN)",
        new="pass",
        tests=(f"{MEETING}::test_the_coordinator_outlives_signals_that_ask_a_run_to_save",),
    ),
    Mutation(
        "a-run-that-was-stopped-started-again",
        "fiddlex/launch/supervisor.py",
        old="if stopped and not self._limits.elastic and",
        new="if False and",
        tests=(f"{SUPERVISOR}::test_a_stop_that_another_host_was_asked_for",),
    ),
    Mutation(
        "a-mistake-tried-again",
        "fiddlex/launch/supervisor.py",
        old="if _MISUSED in statuses:",
        new="if False:",
        tests=(f"{SUPERVISOR}::test_a_mistake_is_not_tried_again",),
    ),
)
