"""Converts weights of Hugging Face's transformers to a workdir, and the weights of a workdir back.

    fiddlex convert --source=hf:/data/Llama-3.2-1B --target=/tmp/llama
    fiddlex convert --source=/tmp/llama --target=hf:/data/my_llama [--dtype=bfloat16]

It knows GPT-2, BERT, Llama, Mistral, Qwen2 and Qwen3 (`architectures` of `config.json`). The new workdir evaluates at
once, a decoder generates too, and `fiddlex train` goes on with it under any config whose model has the same sizes.
Overrides such as --config.model.seq_len=2048 are applied to the config that the new workdir gets, or to the config of
the source.
"""

import logging
import pathlib

from absl import flags

from fiddlex.cluster import processes
from fiddlex.cluster.process_flags import define_processes
from fiddlex.errors import ConfigError
from fiddlex.interop.folder import PREFIX, folder_of
from fiddlex.terminal.command_line import apply_overrides, define_overrides, define_path

logger = logging.getLogger("fiddlex.convert")

define_overrides()
_SOURCE = define_path("source", None, "hf:DIR, a folder of transformers, or a workdir", required=True)
_TARGET = define_path("target", None, "workdir or hf:DIR to make", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "of a folder's tensors; by default that which the weights had"
)
_join = define_processes()


def main(argv: list[str]) -> None:
    """Converts, and tells what it made."""
    _join()
    if processes.num_processes() > 1:
        raise ConfigError(
            f"convert runs as one process, and {processes.num_processes()} were started. Run it once, outside of srun, "
            "mpirun or the job, and without --num_processes."
        )
    from fiddlex.costs.sizes import num_parameters
    from fiddlex.train.run.transfer.conversion import export_workdir, import_folder

    source, target = folder_of(_SOURCE.value), folder_of(_TARGET.value)
    if (source is None) == (target is None):
        raise ConfigError(
            f"--source={_SOURCE.value} and --target={_TARGET.value}: one is a folder of transformers, written {PREFIX}"
            "DIR, and the other a workdir."
        )
    if source is not None:
        if _DTYPE.value:
            raise ConfigError(f"--dtype={_DTYPE.value}: the weights of a workdir are float32. Leave it out.")
        config = import_folder(source, pathlib.Path(_TARGET.value), apply_overrides)
        logger.info("%s has %s parameters of %s.", _TARGET.value, f"{num_parameters(config):,}", source)
    elif target is not None:
        step = export_workdir(pathlib.Path(_SOURCE.value), target, _DTYPE.value or "", apply_overrides)
        logger.info("%s has the weights of step %d of %s.", target, step, _SOURCE.value)
