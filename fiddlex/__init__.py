"""fiddlex: GPT, Llama-type and BERT training with tensor, pipeline and data parallelism as one compiled XLA program.

Importing `fiddlex` imports no jax, so that the parts that only read configs, schedules and topologies start at once.
The usual entry points are `fiddlex.config.Config` and `fiddlex.train.trainer.Trainer`.
"""

__version__ = "0.1.0"
