#!/usr/bin/env bash
# One would guess: lm-eval never shows a document with its answer as a few-shot example when it scores that document.
# Seen (lm-eval 0.4.13, 2026-11-27): a document is left out of its own examples only where fewshot_split names the
#   test_split. A task that has a test_split alone and no fewshot_split takes its examples from the same documents and
#   leaves none out: with 6 documents and 3 examples, 2 of the 6 prompts have their own answer.
# Where it bites: a task of one's own with one file of data and num_fewshot gets a better score the fewer documents it
#   has. The log speaks of a "preconfigured rule" and not of the answer. With `fewshot_split: test` it is left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
"$folder/env/bin/pip" install -q lm-eval==0.4.13
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$folder/home"
"$folder/env/bin/python" -W ignore - "$folder" 2>"$folder/log" <<'PY'
import json
import pathlib
import sys

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = pathlib.Path(sys.argv[1], "tasks")
folder.mkdir()
documents = [{"question": f"Q{number}", "answer": f"A{number}"} for number in range(6)]
(folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
task = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "num_fewshot": 3,
    "metric_list": [{"metric": "exact_match"}],
}
(folder / "alone.yaml").write_text(json.dumps({"task": "alone", **task}))
(folder / "named.yaml").write_text(json.dumps({"task": "named", "fewshot_split": "test", **task}))


class Silent(LM):
    """Answers nothing, and counts the prompts that have the answer of their own document."""

    def generate_until(self, requests):
        self.given_away = sum(request.doc["answer"] in request.args[0] for request in requests)
        return ["" for _ in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


found = {}
for name in ("alone", "named"):
    model = Silent()
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    lm_eval.simple_evaluate(model, tasks=[name], task_manager=manager, bootstrap_iters=0)
    found[name] = model.given_away
    print(f"{name}: {model.given_away} of {len(documents)} prompts have the answer to their own question")
assert found == {"alone": 2, "named": 0}
PY
