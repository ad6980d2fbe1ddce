"""The section `train` of a config: the length of a run, what it does periodically, and what it does about faults."""

import dataclasses

from fiddlex.config import rules
from fiddlex.config.fields import RUN, field
from fiddlex.config.records import Checked
from fiddlex.config.unused import Other
from fiddlex.config.values.every import AUTO, Every, EveryField
from fiddlex.config.values.profiled import parse_ranks, parse_steps
from fiddlex.errors import ConfigError

ON_FAULT = ("stop", "skip", "rollback")
LEAST_SPIKE, MOST_SPIKE = 1.1, 1e6  # bounds of a spike
LEAST_OVERHEAD, MOST_OVERHEAD = 1e-4, 1.0  # of checkpoints, as a share of the time of steps
LEAST_FAILURE_H, MOST_FAILURE_H = 1e-3, 1e6  # between two failures of a run
# Which values of other fields use a field (`fiddlex.config.unused`).
INTERVAL = {"train.checkpoint_every": (AUTO,)}
NO_FAILURES = {"train.mean_time_to_failure_h": (0,)}
CHECKPOINTS = {"train.checkpoint_every": (Other(100),)}
SPIKES = {"train.spike_bound": (Other(4),)}
FAULTS = {"train.on_nonfinite": ("skip", "rollback"), **SPIKES}
PROFILE = {"train.profile_steps": (Other("10:13"),)}
FORMER = {"keep_checkpoints": "keep_last, which counts the newest checkpoint too"}


@dataclasses.dataclass
class TrainConfig(Checked, prefix="config.train.", former=FORMER):
    """Length of the run and its periodic actions. `*_every` fields count steps; 0 turns the action off."""

    num_steps: int = 100  # steps of the run, each an update of the weights
    seed: int = field(0, RUN)  # seed of initial weights and dropout
    log_every: int = 10  # steps from one line of the log to the next; 0: none
    eval_every: int = 0  # steps from one evaluation to the next; the run also ends with one, unless this is 0
    checkpoint_every: EveryField = 0  # steps from one checkpoint to the next | auto; the last step has one, unless 0
    checkpoint_overhead: float = field(0.035, INTERVAL, NO_FAILURES)  # auto: largest share of time that saving may add
    mean_time_to_failure_h: float = field(0.0, INTERVAL)  # auto: hours between two failures; 0: the overhead counts
    keep_last: int = field(2, CHECKPOINTS)  # checkpoints to keep; the next step tells whether the newest is good
    keep_every: int = field(0, CHECKPOINTS)  # keep the first checkpoint of every so many steps, however old; 0: none
    on_nonfinite: str = "stop"  # what a loss or gradient that is not finite does: stop | skip (the update) | rollback
    spike_bound: float = 0.0  # loss or gradient this many times as large as usual is a spike, never an update; 0: off
    on_spike: str = field("skip", SPIKES)  # what a spike does: stop | skip | rollback (and drop the batch)
    max_faults: int = field(10, FAULTS)  # steps that may be skipped or rolled back in a run before it ends
    # workdir, hf:DIR or folder of orbax whose weights this run starts from; it makes a head of another kind anew
    init_from: str = ""
    patience: int = 0  # evaluations without a better one after which the run ends; its best checkpoint is saved
    sample_tokens: int = 0  # tokens of the text sampled at the end of the run; 0: none
    peer_timeout_s: int = 60  # seconds of silence after which another process counts as lost, and the run ends
    step_timeout_s: int = 600  # seconds after which a step, evaluation or checkpoint is reported as stuck; 0: never
    topology: str = ""  # whose chip's peak is that of `mfu`: a name or a .toml path; empty: by the kind of the devices
    compilation_cache: str = AUTO  # folder for compiled programs; auto: one of the user's; empty: none
    profile_steps: str = ""  # first and last step of a profile for TensorBoard, as in 10:13; empty: none
    profile_ranks: str = field("0", PROFILE)  # processes that write the profile, as in 0,3; or all
    wandb_project: str = ""  # project at Weights & Biases to log to as well; takes the extra wandb

    def validate(self) -> None:
        rules.at_least("train.num_steps", self.num_steps, 1)
        rules.at_least("train.peer_timeout_s", self.peer_timeout_s, 5)
        rules.at_least("train.step_timeout_s", self.step_timeout_s, 0)
        parse_steps("train.profile_steps", self.profile_steps, num_steps=self.num_steps)
        parse_ranks("train.profile_ranks", self.profile_ranks)
        rules.choice("train.on_nonfinite", self.on_nonfinite, ON_FAULT)
        rules.choice("train.on_spike", self.on_spike, ON_FAULT)
        rules.at_least("train.max_faults", self.max_faults, 1)
        if self.spike_bound:
            rules.between("train.spike_bound", self.spike_bound, LEAST_SPIKE, MOST_SPIKE)
        for name in ("on_nonfinite", "on_spike"):
            if getattr(self, name) == "rollback" and not self.checkpoint_every:
                raise ConfigError(
                    f"train.{name}=rollback with train.checkpoint_every=0: there would be no checkpoint to go back to. "
                    "Set train.checkpoint_every, or choose skip or stop."
                )
        rules.at_least("train.keep_last", self.keep_last, 2)
        rules.at_least("train.keep_every", self.keep_every, 0)
        rules.at_least("train.seed", self.seed, 0)
        for name in ("log_every", "eval_every", "sample_tokens", "patience"):
            rules.at_least(f"train.{name}", getattr(self, name), 0)
        if not Every(self.checkpoint_every).is_auto:
            rules.at_least("train.checkpoint_every", int(self.checkpoint_every), 0)
        rules.between("train.checkpoint_overhead", self.checkpoint_overhead, LEAST_OVERHEAD, MOST_OVERHEAD)
        if self.mean_time_to_failure_h:
            rules.between("train.mean_time_to_failure_h", self.mean_time_to_failure_h, LEAST_FAILURE_H, MOST_FAILURE_H)
