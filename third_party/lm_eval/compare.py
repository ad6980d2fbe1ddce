"""Compares results of lm-evaluation-harness on its own model `hf` and on fiddlex's, for the same random weights.

    pip install -e '.[lm-eval]' 'lm-eval[hf]'
    HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 python third_party/lm_eval/compare.py

For GPT-2 and Llama it makes a small random model and a tokenizer trained on the standard library's source, saves them
with `save_pretrained`, and converts the folder to workdirs for one device and for data=2 × pipe=2 × tensor=2 with two
chunks. Then the harness runs four local tasks on each: multiple choice, log-likelihoods of continuations, perplexities
of long texts, and greedy generation. It prints the largest differences of metrics and of log-likelihoods.
"""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import sysconfig
import tempfile
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(_name, "1")

import lm_eval  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from fiddlex.config.overrides import replaced  # noqa: E402
from fiddlex.tools.harness import FiddlexLM  # noqa: E402
from fiddlex.train.run.transfer.conversion import import_folder  # noqa: E402

LENGTH, VOCABULARY, NUM_DOCUMENTS = 64, 700, 40
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 × 1 × 1": {},
    "2 × 2 × 2": {
        "mesh.data": 2,
        "mesh.pipe": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.num_chunks": 2,
        "pipeline.num_microbatches": 2,
    },
}
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "continuation": """
output_type: loglikelihood
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "generate": """
output_type: generate_until
generation_kwargs: {until: ["\\n", ")"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two runs of the harness differ.

    Attributes:
      metrics: the largest difference of a metric, relative where it is above 1.
      log_likelihoods: the largest relative difference of a sample's log-likelihood.
      num_log_likelihoods: number of log-likelihoods compared.
      num_greedy: number of continuations whose tokens are all the likeliest, by `hf`.
      greedy: number of continuations of which only one run says so.
      texts: number of generated texts that differ.
      num_texts: number of generated texts compared.
    """

    metrics: float
    log_likelihoods: float
    num_log_likelihoods: int
    num_greedy: int
    greedy: int
    texts: int
    num_texts: int


def train_tokenizer(folder: pathlib.Path, *, beginning: str | None) -> None:
    """Saves a byte-level tokenizer of `VOCABULARY` tokens; `beginning` is a token that each text begins with."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end, *([beginning] if beginning else [])],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_source_files()[:40], trainer)
    if beginning:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{beginning} $A", special_tokens=[(beginning, tokenizer.token_to_id(beginning))]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=beginning or end, eos_token=end
    ).save_pretrained(folder)


def make_folder(folder: pathlib.Path, name: str) -> None:
    """Saves a random model, `GPT-2` or `Llama`, and its tokenizer."""
    torch.manual_seed(0)
    if name == "GPT-2":
        sizes = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH)
        sizes.bos_token_id = sizes.eos_token_id = 0
        model = transformers.GPT2LMHeadModel(sizes)
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
                bos_token_id=1,
                eos_token_id=0,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    train_tokenizer(folder, beginning="<s>" if name == "Llama" else None)


def write_tasks(folder: pathlib.Path, model_folder: pathlib.Path) -> None:
    """Writes the task files and their documents; half of the continuations are the model's own greedy ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    text = "".join(_source_files()[40:60])
    documents = []
    for i in range(NUM_DOCUMENTS):
        # Contexts of a few tokens, of more than the model's sequence, with a space at the end, and none at all.
        start, length = 997 * i, (20, 60, 120, 400)[i % 4]
        context, target = text[start : start + length], text[start + length : start + length + 12]
        if i % 2:
            ids = tokenizer(context, return_tensors="pt").input_ids[:, -LENGTH + 4 :]
            with torch.no_grad():
                target = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :])
        if i % 10 == 0:
            context = f"{context} "
        context = "" if i == 4 else context
        others = [text[start + 31 * k : start + 31 * k + 5 + 3 * k] for k in range(1, 4)]
        choices = [*others[: i % 4], target, *others[i % 4 :]]
        documents.append(
            {
                "context": context,
                "target": target or "x",
                "choices": [choice or "x" for choice in choices],
                "label": i % 4 if i % 4 < 3 else 3,
                "long": text[start : start + 40 * (i + 1)],
            }
        )
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, described in TASKS.items():
        common = f"""task: fiddlex_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "documents.jsonl"}}}}}
test_split: test
target_delimiter: ""
"""
        label = "label" if name == "choice" else "target"
        if name != "rolling":
            # `hf` generates after nothing but padding where the context is empty, which no other model does.
            context = "context or '# '" if name == "generate" else "context"
            common += f'doc_to_text: "{{{{{context}}}}}"\ndoc_to_target: "{{{{{label}}}}}"\n'
        (folder / f"{name}.yaml").write_text(common + described)


def evaluate(model: Any, tasks: pathlib.Path) -> dict[str, Any]:
    """The harness' results of a model on the tasks of a folder."""
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"fiddlex_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    return results


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> Difference:
    """Compares all metrics and all samples."""
    metrics, likelihoods, num_likelihoods, num_greedy, greedy, texts, num_texts = 0.0, 0.0, 0, 0, 0, 0, 0
    for task, described in theirs["results"].items():
        assert described.keys() == ours["results"][task].keys()
        for name, value in described.items():
            if isinstance(value, float):
                metrics = max(metrics, abs(value - ours["results"][task][name]) / max(1.0, abs(value)))
        for first, second in zip(theirs["samples"][task], ours["samples"][task], strict=True):
            assert first["doc"] == second["doc"]
            for [theirs_answer], [our_answer] in zip(first["resps"], second["resps"], strict=True):
                if isinstance(theirs_answer, str):
                    num_texts, texts = num_texts + 1, texts + (theirs_answer != our_answer)
                    continue
                value, is_greedy = theirs_answer if isinstance(theirs_answer, tuple) else (theirs_answer, None)
                our_value, our_greedy = our_answer if isinstance(our_answer, tuple) else (our_answer, None)
                likelihoods = max(likelihoods, abs(value - our_value) / abs(value))
                num_likelihoods += 1
                num_greedy, greedy = num_greedy + bool(is_greedy), greedy + (is_greedy != our_greedy)
    return Difference(metrics, likelihoods, num_likelihoods, num_greedy, greedy, texts, num_texts)


def compare(name: str, folder: pathlib.Path) -> dict[str, Difference]:
    """The differences of one model in each layout.

    Args:
      name: `GPT-2` or `Llama`.
      folder: an empty folder to work in.
    """
    model, tasks = folder / "hf", folder / "tasks"
    tasks.mkdir(parents=True)
    make_folder(model, name)
    write_tasks(tasks, model)
    theirs = evaluate(HFLM(str(model), dtype="float32", device="cpu", batch_size=4), tasks)
    found = {}
    for i, (layout, changes) in enumerate(LAYOUTS.items()):
        import_folder(model, folder / f"run{i}", functools.partial(replaced, values=changes))
        found[layout] = difference(theirs, evaluate(FiddlexLM(str(folder / f"run{i}")), tasks))
    return found


def main() -> None:
    """Prints a table, one line for each model and layout."""
    logging.disable(logging.WARNING)
    fields = dataclasses.fields(Difference)
    print("| model | layout | " + " | ".join(field.name for field in fields) + " |\n|---|---|" + "---:|" * len(fields))
    for name in ("GPT-2", "Llama"):
        with tempfile.TemporaryDirectory() as parent:
            for layout, found in compare(name, pathlib.Path(parent)).items():
                values = dataclasses.astuple(found)
                cells = [f"{value:.1e}" if isinstance(value, float) else str(value) for value in values]
                print(f"| {name} | {layout} | " + " | ".join(cells) + " |")


def _source_files() -> list[str]:
    """Source files of the standard library, in the order of their names."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


if __name__ == "__main__":
    main()
