"""Mistakes that are easily made with the commands, and what each command says: one message, no traceback, no usage.

The messages are golden texts. FOLDER stands for the folder in which a command runs.
"""

import pathlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import Config
from fiddlex.config.warmup import long_warmup
from fiddlex.terminal.flag_hints import number_meant
from tests.programs import call

# Status 2: the command line or the config is wrong. First what follows TRAIN, then whole lines.
TRAIN = "train --config=gpt_tiny --workdir=run "
OF_TRAIN = {
    "--mesh.data=4": "there is no flag --mesh.data, but a field of the config: write --config.mesh.data=4.",
    "--mesh.dta=4": "there is no flag --mesh.dta. config.mesh has no field 'dta'. Did you mean 'data'?",
    "--lr=3": "there is no flag --lr, but a field of the config: write --config.optimizer.learning_rate=3.",
    "--learning-rate 3": (
        "there is no flag --learning-rate, but a field of the config: write --config.optimizer.learning_rate=3."
    ),
    "--learing_rate=3": "there is no flag --learing_rate. Did you mean --config.optimizer.learning_rate=3?",
    "--batch_size=8": (
        "there is no flag --batch_size, but a field of the config: write --config.data.global_batch_size=8."
    ),
    "--seed=1": (
        "there is no flag --seed, but a field of the config: write --config.data.seed=1 or --config.train.seed=1."
    ),
    "--epochs=3": (
        "there is no flag --epochs. The length of a run is train.num_steps, in steps of data.global_batch_size "
        "examples."
    ),
    "--gpus=4": (
        "there is no flag --gpus. The devices of a run are mesh.data × mesh.pipe × mesh.tensor: set these three."
    ),
    "--resume": (
        "there is no flag --resume. A run resumes by itself from its newest checkpoint: give the same --workdir again."
    ),
    "--version": "there is no flag --version. fiddlex --version shows the version.",
    "--verbose": (
        "there is no flag --verbose. Known: --config, --workdir, --elastic, --force, --format, --coordinator_address, "
        "--num_processes, --process_id, --join_timeout_s, --fake_devices."
    ),
    "--config.mesh.data=99999999999999999999": ("config.mesh.data is an integer of 67 bits; it must have at most 63."),
    "--noconfig.mesh.sequence_parallel=1": (
        "--noconfig.mesh.sequence_parallel=1: --no… takes no value. Write --noconfig.mesh.sequence_parallel."
    ),
    "--noforce=true": "--noforce=true: --no… takes no value. Write --noforce.",
    "--format=table": "--format=table is not one of text, json.",
    "--format=jsonl": "--format=jsonl is not one of text, json. Did you mean 'json'?",
    "mesh.data=4": "'mesh.data=4' is not a flag. Write --config.mesh.data=4.",
    "config.mesh.data=4": "'config.mesh.data=4' is not a flag. Write --config.mesh.data=4.",
    "--config.data=4": "config.data is a section and has no value of its own. Did you mean config.mesh.data?",
    "--config.mesh=2,2,2": (
        "config.mesh is a section and has no value of its own. Set one of its fields: data, pipe, tensor, "
        "sequence_parallel, outermost, collective_matmul."
    ),
    "--config.lr=4": "config has no field 'lr'. Did you mean config.optimizer.learning_rate?",
    "--config.train.batch_size=4": (
        "config.train has no field 'batch_size'. Did you mean config.data.global_batch_size?"
    ),
    "--config.optimizer.betas=0.9,0.95": (
        "config.optimizer has no field 'betas'. The two are optimizer.beta1 and optimizer.beta2."
    ),
    "--config.mesh.data = 4": "config.mesh.data='=' must be of type int: leave no space around =.",
    "--noconfig.mesh.data": (
        "there is no flag --noconfig.mesh.data. Only a bool takes --no…: write --config.mesh.data=VALUE."
    ),
    "--config.mesh.sequence_parallel True": (
        "'True' is not a flag. A bool takes its value after =: write --config.mesh.sequence_parallel=true."
    ),
    "--config.mesh.sequence_parallel=yes": ("config.mesh.sequence_parallel='yes' must be of type bool: write true."),
    "--config.train.num_steps=1e3": "config.train.num_steps='1e3' must be of type int: write 1000.",
    "--config.train.num_steps=1k": "config.train.num_steps='1k' must be of type int: write 1000.",
    "--config.train.num_steps=1,000": "config.train.num_steps='1,000' must be of type int: write 1000.",
    "--config.train.num_steps=": "config.train.num_steps='' must be of type int: it has no value.",
    "--config.train.num_steps=ten": "config.train.num_steps='ten' must be of type int, a whole number.",
    "--config.train.num_steps=0": "train.num_steps=0 must be at least 1 and below 2147483648.",
    "--config.optimizer.warmup_steps=0.1": ("config.optimizer.warmup_steps='0.1' must be of type int, a whole number."),
    "--config.optimizer.warmup_steps=5000": (
        "optimizer.warmup_steps=5000 is longer than the run, train.num_steps=600: the learning rate rises to "
        "0.00048 and never to optimizer.learning_rate=0.004. Set optimizer.warmup_steps=60, for example; or "
        "optimizer.decay_steps, the length of the whole schedule, to train the first steps of a longer run."
    ),
    "--config.optimizer.learning_rate=1,5e-3": (
        "config.optimizer.learning_rate='1,5e-3' must be of type float: write 0.0015."
    ),
    "--config.data.eval_fraction=5%": "config.data.eval_fraction='5%' must be of type float: write 0.05.",
    "--config.data.eval_fraction=5": "data.eval_fraction=5.0 must be at least 0 and below 1.",
    "--config.model.dtype=fp16": (
        "model.dtype='fp16' is not one of float32, bfloat16, float16. Did you mean 'float16'?"
    ),
    "--config.optimizer.name=Adam": (
        "optimizer.name='Adam' is not one of adamw, nadamw, adam, adan, lion, muon, lamb, adafactor, sgd. Did "
        "you mean 'adam'?"
    ),
    "--config.mesh.data=0": "mesh.data=0 must be at least 1 and below 2147483648.",
    "--config.mesh.data=3": (
        "data.global_batch_size=16 is not a multiple of mesh.data=3: every replica takes an equal part of the "
        "batch. Use mesh.data 1, 2, 4, 8, or data.global_batch_size 15 or 18."
    ),
    "--config.model.num_heads=5": (
        "model.hidden_size=128 is not a multiple of model.num_heads=5: each attention head gets an equal part of "
        "the hidden size. Use model.num_heads 1, 2, 4, 8, or model.hidden_size 125 or 130."
    ),
    "--config.pipeline.semantics=2wb": "pipeline.semantics: there are no semantics '2wb'. Did you mean '2bw'?",
    "--config.data.source=/data/text.txt": (
        "data.source='/data/text.txt' is not a data source. Write text:/data/text.txt."
    ),
    "--config.data.source=~/books": "data.source='~/books' is not a data source. Write text:~/books.",
    "--config.data.source=/data/books.bin": (
        "data.source='/data/books.bin' is not a data source. Write megatron:/data/books, or "
        "tokens:/data/books.bin for a file of nothing but tokens."
    ),
    "--config.data.source=/data/books.parquet": (
        "data.source='/data/books.parquet' is not a data source. fiddlex prepare_data "
        "--input=/data/books.parquet --output_prefix=PREFIX makes a source of it, megatron:PREFIX."
    ),
    "--config.data.source=txt:/data/a": (
        "data.source='txt:/data/a' is not a data source. There is no kind 'txt'. Write text:/data/a."
    ),
    "--config.data.source=text": ("data.source='text' is not a data source. text needs a path: write text:PATH."),
    "--config.data.source=wikitext": (
        "data.source='wikitext' is not a data source. Use stdlib, text:PATH, hf:PATH, array_record:PATH, "
        "tokens:PATH or megatron:PREFIX; for labelled texts tsv:PATH or jsonl:PATH."
    ),
    "--fake_devices=0": "--fake_devices=0 must be at least 1.",
}
WRONG = {f"{TRAIN}{options}": message for options, message in OF_TRAIN.items()} | {
    "train configs/gpt_tiny.py --workdir=run": (
        "'configs/gpt_tiny.py' is not a flag. Write --config=configs/gpt_tiny.py."
    ),
    "train gpt_tiny --workdir=run": "'gpt_tiny' is not a flag. Write --config=gpt_tiny.",
    "train mine.py --workdir=run": "'mine.py' is not a flag. Write --config=mine.py.",
    "train --config=gpt_tiny run": "'run' is not a flag. Write --workdir=run.",
    "train --config=gpt_tiny.py --workdir=run": (
        "there is no config file FOLDER/gpt_tiny.py. fiddlex comes with a config of that name: --config=gpt_tiny."
    ),
    "train --config=gpt_tny --workdir=run": (
        "there is no config 'gpt_tny'. Did you mean gpt_tiny or bert_tiny? `fiddlex configs` lists those that "
        "fiddlex comes with. Name a file of your own by its path, as in --config=my/config.py."
    ),
    "train --config gpt-tiny --workdir=run": (
        "there is no config 'gpt-tiny'. Did you mean gpt_tiny? `fiddlex configs` lists those that fiddlex comes "
        "with. Name a file of your own by its path, as in --config=my/config.py."
    ),
    "train --config=gpt_tiny:2wb --workdir=run": (
        "the config gpt_tiny takes no argument '2wb'; use --config=gpt_tiny or --config=gpt_tiny:2bw."
    ),
    "train --config=gpt3:20b --workdir=run": (
        "the config gpt3 takes no argument '20b'; use "
        "--config=gpt3:1.7b|3.6b|7.5b|18.4b|39.1b|76.1b|145.6b|174.6b|310.1b|529.6b|1008b."
    ),
    "train --config= --workdir=run": (
        "--config is empty. Name a config that `fiddlex configs` lists, as in --config=gpt_tiny."
    ),
    "train --config=~/nothere.py --workdir=run": "there is no config file FOLDER/nothere.py.",
    "train --config=folder --workdir=run": (
        "--config=folder is a folder. Name a file in it, as in --config=folder/config.py."
    ),
    "train --config=text.txt --workdir=run": (
        "text.txt has no function get_config(); --config needs one that returns a Config."
    ),
    "train --workdir=run": (
        "--config is required: name that `fiddlex configs` lists, or file.py, with :argument; "
        "--config.section.field=value overrides it."
    ),
    "train --config=gpt_tiny": "--workdir is required: directory of the run.",
    "train --config=gpt_tiny --workdir": "--workdir has no value: write --workdir=VALUE.",
    "train --config=gpt_tiny --workdir=": "--workdir is empty; name a directory.",
    "train --config=gpt_tiny --work_dir=run": "there is no flag --work_dir. Did you mean --workdir=run?",
    "train --config=gpt_tiny --output_dir=run": "there is no flag --output_dir. Did you mean --workdir=run?",
    "evaluate run": "'run' is not a flag. Write --workdir=run.",
    "evaluate --workdir=run --config=gpt_tiny": (
        "--config=gpt_tiny: this program takes its config from the workdir, and the file registers no family and no "
        "schedule. Override single fields of it, as --config.section.field=value."
    ),
    "evaluate --workdir=run --output=folder": (
        "--output=folder cannot be written: Is a directory. Name a file in a folder that you may write to."
    ),
    'generate --workdir=run "def "': "'def ' is not a flag. Write --prompt='def '.",
    "generate --workdir=run --temperature=hot": "--temperature=hot must be a number.",
    "generate --workdir=run --max_new_tokens=50": ("there is no flag --max_new_tokens. Did you mean --num_tokens=50?"),
    "generate --workdir=run --top_p=50": "top_p=50.0 must be above 0 and at most 1; 1 allows every token.",
    "schedule 1f1b": "'1f1b' is not a flag. Write --name=1f1b.",
    "schedule --name=1f1b": "schedule 1f1b needs --pipe and --microbatches; only a table has its own.",
    "schedule --name=1F1B --pipe=4 --microbatches=8": "there is no schedule '1F1B': it is called 1f1b here.",
    "schedule --name=1f1b --ranks=4 --microbatches=8": "there is no flag --ranks. Did you mean --pipe=4?",
    "schedule --name=1f1b --pipe=four --microbatches=8": "--pipe=four must be a whole number.",
    "schedule --name=1f1b --pipe=4 --microbatches=8 --output=x.jpg": (
        "--output=x.jpg: no format has the ending .jpg. Use one of .txt, .csv, .json, .svg, .pdf, .png, or add "
        "--format."
    ),
    "schedule --name=1f1b --pipe=4 --microbatches=8 --output=x.png --format=text": (
        "--format=text contradicts --output=x.png, whose ending says png. Leave --format out, or name another file."
    ),
    "schedule --name=1f1b --pipe=4 --microbatches=8 --output=folder": (
        "--output=folder cannot be written: Is a directory. Name a file in a folder that you may write to."
    ),
    "schedule --compare=1f1b gpipe --pipe=4 --microbatches=8": (
        "'gpipe' is not a flag. A list has commas and no spaces: write --compare=1f1b,gpipe."
    ),
    "bubbles --pipe=2,4": "--pipe=2,4 must be one number; several are --pipe=2 --pipe=4.",
    "bubbles --pipe=0": "--pipe=0 must be at least 1.",
    **dict.fromkeys(
        ("bubbles --schedule=auto", "bubbles --schedule=1f1b --schedule=auto --semantics=2bw"),
        "--schedule=auto: a schedule, which is flushed after each batch, is searched for sizes and costs. "
        "fiddlex bubbles --found shows the bubble of the best one beside each row, and "
        "fiddlex schedule --name=auto --pipe=… --microbatches=… the schedule.",
    ),
    "plan --config=gpt_tiny --topology=h100 --num_gpus=8": (
        "there is no flag --num_gpus. Did you mean --num_devices=8?"
    ),
    "plan --config=gpt_tiny --topology=v100 --num_devices=8": (
        "topology 'v100' is not in the catalogue. Did you mean 'v100_16'? A file of your own goes by its path, "
        "which ends in .toml."
    ),
    "plan --config=gpt_tiny --topology=h100 --num_devices=0": "--num_devices=0 must be at least 1.",
    "plan --config=gpt_tiny --topology=h100 --num_devices=8 --format=table": (
        "--format=table is not one of text, json."
    ),
    "plan --config=gpt_tiny --topology=h100.toml --num_devices=8": (
        "topology h100.toml cannot be read: No such file or directory. Give the path of a TOML file."
    ),
    "plan h100 --config=gpt_tiny --num_devices=8": "'h100' is not a flag. Write --topology=h100.",
    "what_if --config=gpt_tiny --topology=h100 --change=bandwith*2": (
        "--change=bandwith*2: Did you mean 'bandwidth'? Or a field, as mesh.pipe=4."
    ),
    "what_if --config=gpt_tiny --topology=h100 --change=mesh.pip=4": (
        "--change=mesh.pip=4: config.mesh has no field 'pip'. Did you mean 'pipe'? Or a field, as mesh.pipe=4."
    ),
    "what_if --config=gpt_tiny --topology=h100 mesh.pipe=4": (
        "'mesh.pipe=4' is not a flag. Write --change=mesh.pipe=4."
    ),
    "what_if --config=gpt_tiny": (
        "Give one of --topology, for times that follow from hardware, and --profile, for measured."
    ),
    "compile --config=gpt_tiny --memory --plot=x.jpg": ("--plot=x.jpg: the name of a picture ends in .svg or .png."),
    "compile --config=gpt_tiny --topology=v5e": (
        "topology 'v5e' is not known. Use cpu; a topology of the catalogue, a100_40, a100_80, b200, gb200, h100, h20, "
        "h200, mi300x, tpu_7x, tpu_v4, tpu_v5e, tpu_v5p, tpu_v6e, trainium2, v100_16; a topology file, whose name ends "
        "in .toml; a whole slice of TPUs as tpu:NAME:SHAPE, such as tpu:v5e:2x4 or tpu:v5p:2x2x1, or several slices as "
        "tpu:NAME:SHAPE:SLICES, such as tpu:v5e:2x4:2, of v2, v3, v4, v5e, v5p, v6e, tpu7x; or GPUs as "
        "gpu:NAME:HOSTSxPER_HOST, such as gpu:h100:2x8, of a100_40, a100, b200, gb200, h100, h200, v100."
    ),
    "benchmark --config=gpt_tiny --seconds=-1": "--seconds=-1 must be at least 0.",
    "benchmark --config=gpt_tiny --profile=folder": (
        "--profile=folder cannot be written: Is a directory. Name a file in a folder that you may write to."
    ),
    "prepare_data text.txt": "'text.txt' is not a flag. Write --input=text.txt.",
    "prepare_data --input=text.txt --output=books": ("there is no flag --output. Did you mean --output_prefix=books?"),
    "prepare_data --input= --output_prefix=books": (
        "--input is empty. Name files, folders or patterns, separated by commas."
    ),
    "prepare_data --input=text.txt --output_prefix=books --train_tokenizer=32k": (
        "--train_tokenizer=32k must be a whole number: write 32000."
    ),
    "convert --source=gpt2 --target=new": (
        "--source=gpt2 and --target=new: one is a folder of transformers, written hf:DIR, and the other a workdir."
    ),
    "convert hf:gpt2 new": "'hf:gpt2' is not a flag. Write --source=hf:gpt2.",
    "checkpoint list --workdir=run": (
        "there is no flag --workdir. Known: --format. Arguments come without a flag, first what to do: list, "
        "verify, diff."
    ),
    "configs gpt_tiny": "'gpt_tiny' is not a flag. This program takes only --format: leave it out.",
    "launch local train": (
        "'train' is one argument too many. A flag is written --name=value. A program and its flags come after --."
    ),
    "trian --config=gpt_tiny": (
        "there is no command 'trian'. Did you mean train? Known: benchmark, bubbles, checkpoint, compile, "
        "completion, configs, convert, evaluate, generate, harness, launch, make_task, plan, prepare_data, "
        "schedule, train, what_if."
    ),
    "--config=gpt_tiny train": (
        "--config=gpt_tiny must follow the command that it is a flag of: fiddlex COMMAND --config=gpt_tiny. "
        "fiddlex lists the commands."
    ),
    "make-task": (
        "there is no command 'make-task'. Did you mean make_task? Known: benchmark, bubbles, checkpoint, "
        "compile, completion, configs, convert, evaluate, generate, harness, launch, make_task, plan, "
        "prepare_data, schedule, train, what_if."
    ),
    "zzz": (
        "there is no command 'zzz'. Known: benchmark, bubbles, checkpoint, compile, completion, configs, "
        "convert, evaluate, generate, harness, launch, make_task, plan, prepare_data, schedule, train, what_if."
    ),
    "__init__": (
        "there is no command '__init__'. Known: benchmark, bubbles, checkpoint, compile, completion, configs, "
        "convert, evaluate, generate, harness, launch, make_task, plan, prepare_data, schedule, train, what_if."
    ),
    "completion": "an argument is missing, the shell: bash, zsh, fish.",
    "completion csh": "there is no completion for 'csh'; use bash, zsh, fish.",
    "completion bash zsh": "'zsh' is one argument too many. A flag is written --name=value.",
    "checkpoint": "an argument is missing, what to do: list, verify, diff.",
    "checkpoint lists run": "there is no 'lists' of checkpoints; use list, verify, diff.",
    "checkpoint list": "list takes WORKDIR, as in fiddlex checkpoint list WORKDIR.",
    "checkpoint list run 5": "list takes WORKDIR, as in fiddlex checkpoint list WORKDIR.",
    "checkpoint verify run newest": ("'newest' is not the step of a checkpoint, which is a number such as 1000."),
    "checkpoint verify run -1": (
        "-1 is read as a flag, and there is none of that name. A number that is no flag's value, such as a step, "
        "must be at least 0; a flag takes a value as in --name=-1."
    ),
    "checkpoint diff run 5 -2": (
        "-2 is read as a flag, and there is none of that name. A number that is no flag's value, such as a step, "
        "must be at least 0; a flag takes a value as in --name=-2."
    ),
    "checkpoint diff run 5": (
        "diff takes WORKDIR STEP [WORKDIR2] STEP2, as in fiddlex checkpoint diff WORKDIR STEP [WORKDIR2] STEP2."
    ),
    "checkpoint diff a 1 b 2 3": "'3' is one argument too many. A flag is written --name=value.",
    "configs -- llama": "'llama' is not a flag. This program takes only --format: leave it out.",
    "benchmark --config=gpt_tiny --python=torch=/env/bin/python --against=torch": (
        "--against=torch: fiddlex benchmark measures fiddlex alone. The drivers of other systems are in "
        "fiddlex's repository: clone it, and run experiments/benchmark.py there (docs/comparisons.md)."
    ),
    'train --config=gpt_tiny --workdir=run --config.data.source="text:no such file.txt"': (
        "data.source: text:FOLDER/no such file.txt: there is no such file or folder. Check the path; "
        "the source `stdlib` needs none."
    ),
    "train --config=gpt_tiny --workdir=run --config.data.tokenizer=gpt2": (
        "data.tokenizer='gpt2': FOLDER/gpt2 does not exist. Use 'bytes' or the path of a tokenizer.json of the "
        "tokenizers library; name one that was moved with --config.data.tokenizer=PATH."
    ),
    "prepare_data --input=text.txt --output_prefix=books": ("--input=text.txt has no text. Name files that have some."),
}
# A URL would be taken for a folder here.
URLS = {
    "train --config=gpt_tiny --workdir=gs://bucket/run": ("--workdir", "gs://bucket/run", "gs://"),
    "train --config=gpt_tiny --workdir=gs:/bucket/run": ("--workdir", "gs:/bucket/run", "gs:/"),
    "train --config=gpt_tiny --workdir=run --config.data.source=text:s3://bucket/books": (
        "data.source",
        "text:s3://bucket/books",
        "s3://",
    ),
    "train --config=gpt_tiny --workdir=run --config.train.init_from=file:///run": (
        "train.init_from",
        "file:///run",
        "file://",
    ),
    "train --config=https://a.org/gpt.py --workdir=run": ("--config", "https://a.org/gpt.py", "https://"),
    "evaluate --workdir=abfs+x://bucket/run": ("--workdir", "abfs+x://bucket/run", "abfs+x://"),
    "evaluate --workdir=run --output=s3://bucket/lines.jsonl": ("--output", "s3://bucket/lines.jsonl", "s3://"),
    "convert --source=hf:s3://bucket/llama --target=run2": ("--source", "hf:s3://bucket/llama", "s3://"),
    "convert --source=run --target=hf:gs://bucket/llama": ("--target", "hf:gs://bucket/llama", "gs://"),
    "prepare_data --input=s3://bucket/a.txt --output_prefix=books": ("--input", "s3://bucket/a.txt", "s3://"),
    "prepare_data --input=text.txt --output_prefix=s3://bucket/books": (
        "--output_prefix",
        "s3://bucket/books",
        "s3://",
    ),
    "checkpoint list gs://bucket/run": ("list", "gs://bucket/run", "gs://"),
    "launch slurm --config=gpt_tiny --topology=h100 --num_devices=8 --workdir=s3://bucket/run": (
        "--workdir",
        "s3://bucket/run",
        "s3://",
    ),
}
OF_URLS = {
    line: f"{name}={value!r} has a URL, {scheme}…: fiddlex reads and writes file systems alone. Mount what it names, "
    "or copy it, and give the path."
    for line, (name, value, scheme) in URLS.items()
}

# Status 1: the command line is right, and the workdir that it names is missing or another one.
MISSING = {
    "evaluate --workdir=nothere": (
        "nothere/config.json does not exist: --workdir=nothere is not the directory of a training run. Train one "
        "with fiddlex train --config=… --workdir=…"
    ),
    "evaluate --workdir=~/nothere": (
        "FOLDER/nothere/config.json does not exist: --workdir=FOLDER/nothere is not the directory of a training run. "
        "Train one with fiddlex train --config=… --workdir=…"
    ),
    "evaluate --workdir=text.txt": "--workdir=text.txt is a file. Name the directory of a training run.",
    "evaluate --workdir=run --config.model.num_layers=8": (
        "The weights in --workdir=run are those of another model:\n  model.num_layers is 8, was 4\nLeave these "
        "fields as they are there."
    ),
    "checkpoint list nothere": "nothere is not a directory. Name the --workdir of a run.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a run that has a config alone, an empty file and an empty folder."""
    path = tmp_path_factory.mktemp("mistakes")
    for name in ("run", "folder"):
        (path / name).mkdir()
    (path / "run" / "config.json").write_text(Config().to_json())
    (path / "text.txt").write_text("")
    return path


@pytest.mark.parametrize("line", [*WRONG, *OF_URLS, *MISSING])
def test_what_is_said_of_a_mistake(line: str, folder: pathlib.Path) -> None:
    before = sorted(folder.rglob("*"))
    done = call(
        "fiddlex", *shlex.split(line), status=1 if line in MISSING else 2, cwd=folder, environment={"HOME": str(folder)}
    )
    said = done.stderr.replace(str(folder), "FOLDER").removeprefix("The platform is CPU: made 8 fake devices")
    program, _, message = said[said.index("fiddlex") :].partition(": ")
    assert message == f"{(WRONG | OF_URLS | MISSING)[line]}\n"
    assert program in ("fiddlex", f"fiddlex {line.split()[0]}")
    assert done.stdout == ""
    assert sorted(folder.rglob("*")) == before  # a mistake leaves nothing behind


@given(st.integers(1, 10**6))
def test_a_number_with_separators_a_unit_or_an_exponent_is_understood(number: int) -> None:
    forms = {f"{number:,}": 1, f"{number}.0": 1, f"{number}e0": 1, f"{number}k": 10**3, f"{number} M": 10**6}
    for text, factor in forms.items():
        assert number_meant(text, int) == f": write {number * factor}"
    assert number_meant(f"{number}%", float) == f": write {number / 100:.12g}"


@pytest.mark.parametrize("text", ["ten", "0.5", "1,2,3", "1.2.3", "", "k", "0.0001k", "1e999"])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    assert number_meant(text, int) == ""
    assert "inf" not in number_meant(text, float)


@pytest.mark.parametrize(("warmup", "decay", "wrong"), [(10, 0, False), (11, 0, True), (11, 11, False), (0, 0, False)])
def test_a_warmup_that_is_longer_than_the_run_is_named(warmup: int, decay: int, wrong: bool) -> None:
    config = Config()
    config.train.num_steps = 10
    config.optimizer.warmup_steps, config.optimizer.decay_steps = warmup, decay
    assert bool(long_warmup(config.validate())) == wrong
