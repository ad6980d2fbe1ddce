"""Measures the train step of a config on this machine, what bounds it, or a profile of the machine for predictions.

    fiddlex benchmark --config=gpt_tiny [--config.mesh.pipe=4 --seconds=30 --format=json …]
    fiddlex benchmark --data --config=gpt_tiny [--store_mb_per_s=100 --store_latency_ms=2 …]
    fiddlex benchmark --profile=here.json --config=gpt_tiny --config.mesh.data=1 …

With `--data` it tells whether fetching data, preparing batches or the devices bound the run, and what would mend it
(docs/data_stalls.md).

A profile holds the times of one layer of the config's model for a microbatch of its size, and everything else that
`fiddlex what_if` and `experiments/predicted_steps.py` need to predict the step of any layout. It is fitted to
steps with one replica and no pipeline, so that only the tensor parallelism of the config's mesh matters. If the file
exists, the config's shape is added to it as an entry, which replaces an entry of the same shape.

`experiments/benchmark.py --against=NAME` of the repository measures other systems beside it (docs/comparisons.md).
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from fiddlex.cluster.process_flags import define_processes
from fiddlex.config import Config, rules
from fiddlex.config.overrides import replaced
from fiddlex.costs.sizes import model_flops
from fiddlex.errors import ConfigError
from fiddlex.planner.fit import Calibration
from fiddlex.planner.profile import Profile, load_profile, save_profile
from fiddlex.planner.report import exchange_text
from fiddlex.terminal.command_line import define_config, define_path
from fiddlex.terminal.output_format import check_output
from fiddlex.terminal.readable import counted, readable_size

if TYPE_CHECKING:
    from fiddlex.tools.stalls import Analysis

_MOST_LATENCY_MS, _LEAST_MB_PER_S = 10_000, 0.001  # with slower stores a measurement takes hours

_CONFIG = define_config()
_PROFILE = define_path("profile", None, "JSON file to write a profile of this machine to, or to add to")
_DATA = flags.DEFINE_bool("data", False, "tells which of fetching, preparation and devices bounds the run")
_STORE_MB_PER_S = flags.DEFINE_float(
    "store_mb_per_s",
    None,
    "with --data: as if the store, which the data are read from, sent them at this rate, in MB/s",
)
_STORE_LATENCY_MS = flags.DEFINE_float(
    "store_latency_ms", 0.0, "with --data: as if the store took that long to begin to send each sample"
)
_DEVICES = flags.DEFINE_multi_integer(
    "devices", [2, 4, 8], "numbers of devices whose sharing is measured", lower_bound=2
)
_SECONDS = flags.DEFINE_float("seconds", 60.0, "of all turns together, compilation aside", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each step, however long they take", lower_bound=1)
_FORCE = flags.DEFINE_bool("force", False, "run although the memory is predicted not to be enough (docs/memory.md)")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")
_join = define_processes()


class _AgainstParser(flags.ArgumentParser):
    """Refuses `--against`, before the flags that belong to it are found unknown."""

    def parse(self, argument: str) -> str:
        """Raises ConfigError."""
        raise ConfigError(
            f"--against={argument}: fiddlex benchmark measures fiddlex alone. The drivers of other systems are in "
            "fiddlex's repository: clone it, and run experiments/benchmark.py there (docs/comparisons.md)."
        )


flags.DEFINE(
    _AgainstParser(),
    "against",
    None,
    "other systems to measure beside; experiments/benchmark.py --against=NAME --help lists the flags for it",
)


def main(argv: list[str]) -> None:
    """Measures and prints the step or the profile."""
    _join()
    config = _CONFIG.value.validate()
    rules.at_least("--seconds", _SECONDS.value, 0)
    _check_flags()
    if _DATA.value:
        analysis = analyse_data(config)
        print(json.dumps(analysis.to_record()) if _FORMAT.value == "json" else analysis.describe())
        return
    if _PROFILE.value:
        profile = measure_profile(config, pathlib.Path(_PROFILE.value))
        save_profile(profile, _PROFILE.value)
        print(json.dumps(dataclasses.asdict(profile)) if _FORMAT.value == "json" else describe(profile))
        return
    facts = measure_step(config)
    if _FORMAT.value == "json":
        print(json.dumps(facts))
        return
    print(
        f"{facts['machine']}, {counted(config.mesh.num_devices, 'device')}, jax {facts['jax_version']}\n"
        f"step    {facts['step_time_s']:.4g} s, the median of {facts['num_steps']}; the fastest "
        f"{facts['fastest_step_s']:.4g} s, half of them between {facts['quartiles_s'][0]:.4g} and "
        f"{facts['quartiles_s'][1]:.4g} s\n"
        f"tokens  {facts['tokens_per_second']:,.0f} a second\n"
        f"model   {facts['model_tflops_per_device']:.4g} TFLOP/s on each device"
    )
    if facts["allocated_bytes"] is not None:
        print(f"memory  {readable_size(facts['allocated_bytes'])} allocated at most on a device")


def _check_flags() -> None:
    """Raises ConfigError for a flag that what is measured would ignore."""
    if _DATA.value and _PROFILE.value:
        raise ConfigError(f"--data and --profile={_PROFILE.value}: each is a measurement of its own. Leave one out.")
    if _PROFILE.present and not _PROFILE.value:
        raise ConfigError("--profile= names no file. Name one, or leave it out.")
    if _DATA.value and _ROUNDS.present:
        raise ConfigError("--rounds with --data: it changes nothing, --data measures for --seconds. Leave it out.")
    readers = {
        "--data": (_DATA.value, (_STORE_MB_PER_S, _STORE_LATENCY_MS)),
        "--profile": (_PROFILE.value, (_DEVICES,)),
    }
    for reader, (given, read) in readers.items():
        for flag in read:
            if flag.present and not given:
                raise ConfigError(f"--{flag.name} without {reader}: it changes nothing. Add {reader}, or leave it out.")


def measure_step(config: Config) -> dict[str, Any]:
    """Measures the step of the config itself, with the most memory that its devices tell to have allocated."""
    import jax

    from fiddlex.train.run.checkpoints.snapshot import memory_stats
    from fiddlex.train.timing import TimedCase, about, time_steps

    min_rounds = max(_ROUNDS.value, 2)
    (seconds,) = time_steps([TimedCase(config)], limit_s=_SECONDS.value, min_rounds=min_rounds, force=_FORCE.value)
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    flops = model_flops(config) / median / config.mesh.num_devices
    peaks = [(memory_stats(device) or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return about() | {
        "step_time_s": median,
        "fastest_step_s": min(seconds),
        "quartiles_s": [first, third],
        "num_steps": len(seconds),
        "tokens_per_second": config.tokens_per_step / median,
        "model_tflops_per_device": flops / 1e12,
        "allocated_bytes": max((peak for peak in peaks if peak is not None), default=None),
    }


def analyse_data(config: Config) -> "Analysis":
    """Measures what bounds a run of the config without a cache of samples and without other runs.

    Raises:
      ConfigError: when there are several processes, or a flag is out of range.
    """
    from fiddlex.cluster import processes
    from fiddlex.data import Loader
    from fiddlex.data.dataset import load_dataset
    from fiddlex.data.staged_examples import SlowStore, StagedExamples
    from fiddlex.tools.stalls import Analysis, measure_loader, num_epochs
    from fiddlex.train.timing import time_with_data_there

    rules.between("--store_latency_ms", _STORE_LATENCY_MS.value, 0, _MOST_LATENCY_MS)
    mb_per_s = math.inf if _STORE_MB_PER_S.value is None else _STORE_MB_PER_S.value
    if not mb_per_s >= _LEAST_MB_PER_S:
        raise ConfigError(f"--store_mb_per_s={mb_per_s:g} must be at least {_LEAST_MB_PER_S}.")
    if processes.num_processes() > 1:
        raise ConfigError("--data with several processes: each has a loader of its own. Measure one process.")
    data, limit_s = config.data, _SECONDS.value / 6  # of five measurements of the loader and one of the devices
    alone = replaced(config, {"data.sample_cache_gib": 0.0, "data.sample_cache_folder": "", "data.share": ""})
    dataset = load_dataset(alone)
    for source in dataset.sources:
        if isinstance(source, StagedExamples):
            source.store = SlowStore(bytes_per_s=1e6 * mb_per_s, latency_s=_STORE_LATENCY_MS.value / 1e3)
    times = measure_loader(
        lambda examples: Loader(
            examples,
            global_batch_size=data.global_batch_size,
            seed=data.seed,
            vocab_size=config.model.vocab_size,
        ),
        dataset.train,
        num_threads=data.num_threads,
        limit_s=limit_s,
    )
    epochs = num_epochs(dataset.train, config.train.num_steps * data.global_batch_size)
    step_times = time_with_data_there(alone, dataset, limit_s=limit_s, force=_FORCE.value)
    return Analysis(statistics.median(step_times), times, epochs)


def measure_profile(config: Config, path: pathlib.Path) -> Profile:
    """A new profile of this machine, or the profile in the file with one more entry.

    Raises:
      ConfigError: when the file is not a profile, is of another machine, or is missing and the config is tensor
        parallel.
    """
    check_output("--profile", path)  # before the measurement, which takes minutes
    known = load_profile(path) if path.exists() else None
    if known is None and config.mesh.tensor > 1:
        raise ConfigError(
            f"mesh.tensor={config.mesh.tensor}: a new profile begins with mesh.tensor=1, for what devices lose that "
            f"share cores. Measure that first, then add this shape to {path}."
        )
    calibration = Calibration.of(config, () if known else sorted(set(_DEVICES.value)))

    from fiddlex.cluster.mesh import request_devices
    from fiddlex.train.timing import about, measured_profile

    request_devices(max(each.mesh.num_devices for each in calibration.configs))
    machine = about()["machine"]
    if known and known.machine != machine:
        raise ConfigError(f"{path} is a profile of {known.machine}; this is {machine}. Name another file.")
    profile = measured_profile(calibration, limit_s=_SECONDS.value, min_rounds=_ROUNDS.value, force=_FORCE.value)
    return known.with_entry(profile.entries[0]) if known else profile


def describe(profile: Profile) -> str:
    """A profile as text for people."""
    rows = [
        f"{profile.machine}, jax {profile.jax_version}, {profile.date}",
        f"update  {1e9 * profile.update_s:.3g} ns for each weight ({profile.optimizer}), and {profile.fixed_s:.3g} s",
        f"devices {_listed(profile.devices)} at work: {_listed(profile.sharing)} times as slow, ticks of "
        f"{_listed([1e3 * tick for tick in profile.tick_s])} ms",
    ]
    for entry in profile.entries:
        model = entry.model
        rows.append(
            f"{model.family}, hidden {model.hidden_size}, sequence {model.seq_len}, {model.dtype}, microbatch "
            f"{entry.microbatch_size}, tensor {entry.tensor}{exchange_text(entry.mesh)}, recompute {entry.recompute}: "
            f"layer {1e3 * entry.forward_s:.3g} ms forward and {1e3 * entry.backward_s:.3g} backward, outside "
            f"{1e3 * entry.edges_s:.3g}"
        )
    return "\n".join(rows)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
