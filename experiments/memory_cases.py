"""The cases of experiments/memory_model.py: real models, 110 million to 175 billion parameters, on TPUs and GPUs.

Each case is a config of configs/, a topology, and changes to the config in the form of overrides: `mesh.pipe=4` is
`--config.mesh.pipe=4` for experiments/compile.py. Batches are a few microbatches per replica, since the number of
microbatches affects the memory of GPipe alone; meshes are the smallest that the layout needs.
"""

import math
from typing import NamedTuple


class MemoryCase(NamedTuple):
    """A train step of `config`, a file of configs/, with `changes` applied, compiled for `topology`."""

    config: str
    topology: str
    changes: str


GPT_SMALL = "configs/gpt2_small.py"
GPT_MEDIUM = "configs/gpt2_medium.py"
GPT_LARGE = "configs/gpt2_large.py"
GPT_XL = "configs/gpt2_xl.py"
GPT_7B = "configs/gpt3.py:7.5b"
LLAMA_1B = "configs/llama.py:1b"
GPT_175B = (
    "model.num_layers=96 model.hidden_size=12288 model.num_heads=96 mesh.data=2 mesh.pipe=8 mesh.tensor=8 "
    "pipeline.num_microbatches=16 data.global_batch_size=32"
)  # GPT-3's shape (Brown et al. 2020, table 2.1)
EIGHT_BY_ONE = "mesh.data=8 pipeline.num_microbatches=2 data.global_batch_size=64"
TWO_BY_FOUR = "mesh.data=2 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=64"
SIXTEEN = "pipeline.num_microbatches=16 data.global_batch_size=32"

CASES = {
    # GPT-2 and its layouts
    "small, 4 replicas": MemoryCase(
        GPT_SMALL, "tpu:v5e:2x2", "mesh.data=4 pipeline.num_microbatches=2 data.global_batch_size=64"
    ),
    "small, float32": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=2 mesh.pipe=2 pipeline.num_microbatches=4 data.global_batch_size=16 model.dtype=float32",
    ),
    "small, dropout, selective": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=64 model.dropout=0.1 "
        "pipeline.recompute=selective",
    ),
    "medium, 1F1B": MemoryCase(GPT_MEDIUM, "tpu:v5e:2x4", TWO_BY_FOUR),
    "medium, GPipe, full": MemoryCase(
        GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.schedule=gpipe pipeline.recompute=full"
    ),
    "medium, interleaved, selective": MemoryCase(
        GPT_MEDIUM,
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} pipeline.schedule=interleaved_1f1b pipeline.num_chunks=3 pipeline.recompute=selective",
    ),
    "medium, Muon, 2BW": MemoryCase(
        GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} optimizer.name=muon pipeline.semantics=2bw pipeline.recompute=full"
    ),
    "medium, 2BW predicted from two updates": MemoryCase(
        GPT_MEDIUM,
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} pipeline.semantics=2bw pipeline.prediction=extrapolate pipeline.prediction_order=2 "
        "pipeline.recompute=full",
    ),
    "medium, 2BW predicted by momentum and gradient": MemoryCase(
        GPT_MEDIUM,
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} pipeline.semantics=2bw pipeline.prediction=momentum pipeline.prediction_order=2 "
        "pipeline.recompute=full",
    ),
    "medium, ZB-H1, selective": MemoryCase(
        GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.schedule=zb_h1 pipeline.recompute=selective"
    ),
    "medium, float16": MemoryCase(
        GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} model.dtype=float16 pipeline.recompute=selective"
    ),
    "large, 1F1B, full, LAMB": MemoryCase(
        GPT_LARGE, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.recompute=full optimizer.name=lamb"
    ),
    "large, tensor and sequence parallel": MemoryCase(
        GPT_LARGE,
        "tpu:v5e:2x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=4 mesh.sequence_parallel=True pipeline.num_microbatches=4 "
        "data.global_batch_size=16",
    ),
    "large, uneven stages, full": MemoryCase(
        GPT_LARGE,
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} pipeline.recompute=full pipeline.layers_per_stage=6,9,12,9",
    ),
    "xl, Adafactor": MemoryCase(
        GPT_XL, "tpu:v5e:2x4", f"{EIGHT_BY_ONE} pipeline.recompute=full optimizer.name=adafactor"
    ),
    "xl, without ZeRO-1": MemoryCase(
        GPT_XL, "tpu:v5p:2x2x2", f"{EIGHT_BY_ONE} pipeline.recompute=full optimizer.zero1=False"
    ),
    "xl, SGD": MemoryCase(GPT_XL, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.recompute=full optimizer.name=sgd"),
    "xl, 2BW": MemoryCase(GPT_XL, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.recompute=full pipeline.semantics=2bw"),
    "xl, weight stashing": MemoryCase(
        GPT_XL, "tpu:v5p:2x2x2", f"{TWO_BY_FOUR} pipeline.recompute=full pipeline.semantics=stash"
    ),
    "xl, ZB-V, selective": MemoryCase(
        GPT_XL,
        "tpu:v5p:2x2x2",
        f"{TWO_BY_FOUR} pipeline.schedule=zb_v pipeline.num_chunks=2 pipeline.recompute=selective",
    ),
    # GPT-3
    "1.7b, 8 replicas": MemoryCase(
        "configs/gpt3.py:1.7b", "tpu:v5p:2x2x2", "mesh.data=8 pipeline.num_microbatches=4 data.global_batch_size=128"
    ),
    "3.6b, tensor parallel": MemoryCase(
        "configs/gpt3.py:3.6b", "tpu:v5p:2x2x2", "mesh.data=4 pipeline.num_microbatches=4 data.global_batch_size=64"
    ),
    "7.5b, sequence parallel, selective": MemoryCase(
        "configs/gpt3.py:7.5b",
        "tpu:v5p:2x2x4",
        "mesh.data=4 mesh.sequence_parallel=True pipeline.recompute=selective pipeline.num_microbatches=4 "
        "data.global_batch_size=32",
    ),
    "7.5b, vertical sync": MemoryCase(
        "configs/gpt3.py:7.5b",
        "tpu:v5p:2x2x4",
        "mesh.data=1 mesh.pipe=4 mesh.tensor=4 pipeline.semantics=vertical_sync pipeline.num_microbatches=8 "
        "data.global_batch_size=16",
    ),
    "18.4b, tensor parallel": MemoryCase(
        "configs/gpt3.py:18.4b",
        "tpu:v5p:2x4x4",
        "mesh.data=4 mesh.tensor=8 pipeline.num_microbatches=4 data.global_batch_size=32",
    ),
    "18.4b, delay of 2": MemoryCase(
        "configs/gpt3.py:18.4b",
        "tpu:v5p:2x4x4",
        "mesh.data=2 mesh.pipe=2 mesh.tensor=8 pipeline.semantics=delay:2 pipeline.num_microbatches=4 "
        "data.global_batch_size=16",
    ),
    "39.1b, ZB-H1": MemoryCase(
        "configs/gpt3.py:39.1b",
        "tpu:v5p:2x4x4",
        "mesh.data=1 mesh.pipe=4 mesh.tensor=8 pipeline.schedule=zb_h1 pipeline.num_chunks=1 "
        "pipeline.recompute=selective pipeline.num_microbatches=8 data.global_batch_size=8",
    ),
    "76.1b, interleaved": MemoryCase(
        "configs/gpt3.py:76.1b", "tpu:v5p:4x4x4", "mesh.data=2 pipeline.num_microbatches=8 data.global_batch_size=32"
    ),
    "145.6b, interleaved": MemoryCase(
        "configs/gpt3.py:145.6b", "tpu:v5p:4x4x8", "mesh.data=2 pipeline.num_microbatches=16 data.global_batch_size=32"
    ),
    "175b, 1F1B": MemoryCase(
        "configs/gpt3.py:145.6b",
        "tpu:v5p:4x4x8",
        f"{GPT_175B} pipeline.schedule=1f1b pipeline.num_chunks=1",
    ),
    "175b, sequence parallel, selective": MemoryCase(
        "configs/gpt3.py:145.6b",
        "tpu:v5p:4x4x8",
        f"{GPT_175B} pipeline.num_chunks=3 mesh.sequence_parallel=True pipeline.recompute=selective",
    ),
    "175b, 2BW": MemoryCase(
        "configs/gpt3.py:145.6b",
        "tpu:v5p:4x4x8",
        f"{GPT_175B} pipeline.schedule=1f1b pipeline.num_chunks=1 pipeline.semantics=2bw",
    ),
    # BERT
    "BERT base, 8 replicas": MemoryCase("configs/bert_base.py", "tpu:v5e:2x4", ""),
    "BERT base, 1F1B, selective": MemoryCase(
        "configs/bert_base.py", "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.recompute=selective"
    ),
    "BERT large, tensor parallel, full": MemoryCase(
        "configs/bert_large.py",
        "tpu:v5e:2x4",
        "mesh.data=1 mesh.pipe=4 mesh.tensor=2 pipeline.recompute=full pipeline.num_microbatches=8 "
        "data.global_batch_size=128",
    ),
    "BERT large, LAMB, float32": MemoryCase(
        "configs/bert_large.py",
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} model.dtype=float32 optimizer.name=lamb pipeline.recompute=full",
    ),
    "BERT large, interleaved, no dropout": MemoryCase(
        "configs/bert_large.py",
        "tpu:v5e:2x4",
        f"{TWO_BY_FOUR} pipeline.schedule=interleaved_1f1b pipeline.num_chunks=2 model.dropout=0.0",
    ),
    "BERT 355m, 2BW": MemoryCase(
        "configs/bert_2bw.py:355m", "tpu:v5e:2x4", "pipeline.num_microbatches=4 data.global_batch_size=128"
    ),
    "BERT 1.3b, 2BW": MemoryCase("configs/bert_2bw.py:1.3b", "tpu:v5e:4x4", "data.global_batch_size=256"),
    "BERT 2.2b, 2BW": MemoryCase("configs/bert_2bw.py:2.2b", "tpu:v5e:8x8", "data.global_batch_size=512"),
    "BERT 3.8b, 2BW": MemoryCase("configs/bert_2bw.py:3.8b", "tpu:v5e:8x8", "data.global_batch_size=512"),
    "BERT base, MNLI": MemoryCase("configs/bert_mnli.py", "tpu:v5e:2x2", "mesh.data=4"),
    "BERT large, RACE": MemoryCase("configs/bert_race.py", "tpu:v5e:2x4", ""),
    # Compiled after the formulas were final
    "small, tensor parallel, selective": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=2 mesh.tensor=2 pipeline.num_microbatches=4 data.global_batch_size=64 pipeline.recompute=selective",
    ),
    "small, short sequences, full": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=4 pipeline.num_microbatches=16 data.global_batch_size=64 pipeline.recompute=full model.seq_len=512",
    ),
    "medium, long sequences, ZB-H2": MemoryCase(
        GPT_MEDIUM,
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.schedule=zb_h2 pipeline.num_microbatches=16 data.global_batch_size=16 "
        "model.seq_len=2048",
    ),
    "large, sequence parallel, dropout": MemoryCase(
        GPT_LARGE,
        "tpu:v5p:2x2x1",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=2 mesh.sequence_parallel=True pipeline.num_microbatches=4 "
        "data.global_batch_size=32 pipeline.recompute=selective model.dropout=0.1",
    ),
    "large, 2BW, Adafactor": MemoryCase(
        GPT_LARGE,
        "tpu:v5e:2x4",
        "mesh.data=4 mesh.pipe=2 pipeline.num_microbatches=4 data.global_batch_size=64 pipeline.recompute=full "
        "pipeline.semantics=2bw optimizer.name=adafactor",
    ),
    "xl, 4 replicas": MemoryCase(
        GPT_XL, "tpu:v5p:2x2x1", "mesh.data=4 pipeline.num_microbatches=8 data.global_batch_size=32"
    ),
    "1.7b, 2BW, selective": MemoryCase(
        "configs/gpt3.py:1.7b",
        "tpu:v5p:2x2x1",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=8 pipeline.semantics=2bw "
        "pipeline.recompute=selective",
    ),
    "3.6b, interleaved, LAMB": MemoryCase(
        "configs/gpt3.py:3.6b",
        "tpu:v5p:2x2x2",
        "mesh.data=2 mesh.pipe=4 mesh.tensor=1 pipeline.schedule=interleaved_1f1b pipeline.num_chunks=2 "
        "pipeline.num_microbatches=8 data.global_batch_size=16 optimizer.name=lamb",
    ),
    "7.5b, ZB-H1, full": MemoryCase(
        "configs/gpt3.py:7.5b",
        "tpu:v5p:2x2x2",
        "mesh.data=1 mesh.pipe=8 mesh.tensor=1 pipeline.schedule=zb_h1 pipeline.num_microbatches=16 "
        "data.global_batch_size=16",
    ),
    "39.1b, sequence parallel, Adafactor": MemoryCase(
        "configs/gpt3.py:39.1b",
        "tpu:v5p:2x4x4",
        "mesh.data=2 mesh.sequence_parallel=True pipeline.num_microbatches=8 data.global_batch_size=32 "
        "optimizer.name=adafactor",
    ),
    "BERT large, without ZeRO-1": MemoryCase(
        "configs/bert_large.py",
        "tpu:v5e:2x2",
        "mesh.data=2 mesh.pipe=2 pipeline.num_microbatches=8 data.global_batch_size=128 pipeline.recompute=full "
        "optimizer.zero1=False",
    ),
    "BERT 1.3b, 1F1B, no dropout": MemoryCase(
        "configs/bert_2bw.py:1.3b",
        "tpu:v5p:2x2x1",
        "mesh.data=1 pipeline.num_microbatches=8 data.global_batch_size=64 pipeline.semantics=sync "
        "pipeline.recompute=none model.dropout=0.0",
    ),
    # Chosen to break the formulas
    "small, 2BW": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.semantics=2bw pipeline.num_microbatches=8 data.global_batch_size=32",
    ),
    "1.7b, 2BW": MemoryCase(
        "configs/gpt3.py:1.7b",
        "tpu:v5p:2x2x1",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=8 pipeline.semantics=2bw "
        "pipeline.recompute=none",
    ),
    "BERT base, weight stashing": MemoryCase(
        "configs/bert_base.py",
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.semantics=stash pipeline.num_microbatches=8 data.global_batch_size=64",
    ),
    "small, sequences of 8,192, full": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 model.seq_len=8192 pipeline.num_microbatches=4 data.global_batch_size=4 "
        "pipeline.recompute=full",
    ),
    "medium, odd layers, ZB-V, full": MemoryCase(
        GPT_MEDIUM,
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.pipe=4 model.num_layers=13 pipeline.schedule=zb_v pipeline.num_chunks=2 "
        "pipeline.recompute=full pipeline.num_microbatches=6 data.global_batch_size=48",
    ),
    "large, 2BW, interleaved, selective": MemoryCase(
        GPT_LARGE,
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.pipe=4 pipeline.schedule=interleaved_1f1b pipeline.num_chunks=3 pipeline.semantics=2bw "
        "pipeline.num_microbatches=8 data.global_batch_size=32 pipeline.recompute=selective",
    ),
    "small, one layer a stage": MemoryCase(
        GPT_SMALL,
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.schedule=interleaved_1f1b pipeline.num_chunks=3 "
        "pipeline.num_microbatches=8 data.global_batch_size=32",
    ),
    "18.4b, 2BW, sequence parallel, selective": MemoryCase(
        "configs/gpt3.py:18.4b",
        "tpu:v5p:4x8x8",
        "mesh.data=16 mesh.pipe=8 mesh.tensor=2 mesh.sequence_parallel=True pipeline.semantics=2bw "
        "pipeline.num_microbatches=32 data.global_batch_size=1024 pipeline.recompute=selective",
    ),
    "1.7b, one layer a stage": MemoryCase(
        "configs/gpt3.py:1.7b",
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.pipe=4 pipeline.schedule=interleaved_1f1b pipeline.num_chunks=6 "
        "pipeline.num_microbatches=8 data.global_batch_size=16 pipeline.recompute=selective",
    ),
    # Llama and Qwen3
    "Llama 1b, sequences of 8,192, full": MemoryCase(
        LLAMA_1B, "tpu:v5p:2x2x2", "mesh.data=2 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=16"
    ),
    "Llama 1b, LAMB, full": MemoryCase(
        LLAMA_1B,
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=32 model.seq_len=1024 "
        "optimizer.name=lamb",
    ),
    "Llama 1b, tensor parallel, selective": MemoryCase(
        LLAMA_1B,
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.tensor=4 pipeline.num_microbatches=4 data.global_batch_size=8 model.seq_len=4096 "
        "pipeline.recompute=selective",
    ),
    "Llama 1b, 16 tensor ranks share 8 heads of keys": MemoryCase(
        LLAMA_1B,
        "tpu:v5e:4x4",
        "mesh.data=1 mesh.tensor=16 mesh.sequence_parallel=True pipeline.num_microbatches=4 data.global_batch_size=8 "
        "model.seq_len=4096 pipeline.recompute=selective",
    ),
    "Llama 1b, 2BW, selective": MemoryCase(
        LLAMA_1B,
        "tpu:v5p:2x2x1",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=8 model.seq_len=2048 "
        "pipeline.semantics=2bw pipeline.recompute=selective",
    ),
    "Llama 8b, sequence parallel, full": MemoryCase(
        "configs/llama.py:8b",
        "tpu:v5p:2x2x2",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=4 pipeline.num_microbatches=4 data.global_batch_size=4",
    ),
    "Llama 8b, ZB-H1": MemoryCase(
        "configs/llama.py:8b",
        "tpu:v5p:2x2x4",
        "mesh.data=1 mesh.pipe=8 mesh.tensor=2 pipeline.schedule=zb_h1 pipeline.num_microbatches=16 "
        "data.global_batch_size=16 model.seq_len=2048 pipeline.recompute=none",
    ),
    "Llama 70b, interleaved, full": MemoryCase(
        "configs/llama.py:70b", "tpu:v5p:4x4x8", "mesh.data=2 pipeline.num_microbatches=16 data.global_batch_size=32"
    ),
    "Qwen3 0.6b, 1F1B": MemoryCase(
        "configs/qwen3.py:0.6b",
        "tpu:v5p:2x2x2",
        "mesh.data=2 mesh.pipe=4 pipeline.num_microbatches=8 data.global_batch_size=32 model.seq_len=2048 "
        "pipeline.recompute=none",
    ),
    "Qwen3 4b, Muon, full": MemoryCase(
        "configs/qwen3.py:4b",
        "tpu:v5p:2x2x2",
        "mesh.data=2 mesh.pipe=2 mesh.tensor=2 pipeline.num_microbatches=4 data.global_batch_size=16 "
        "optimizer.name=muon",
    ),
}

# One model with ever longer sequences, which the flash kernel of TPUs makes possible.
LONG = {
    f"2,048 wide, sequences of {length:,}, {chip}, {recompute}": MemoryCase(
        GPT_SMALL,
        f"tpu:{chip}:{shape}",
        "model.num_layers=4 model.hidden_size=2048 model.num_heads=16 mesh.data=1 mesh.pipe=2 mesh.tensor=2 "
        "mesh.sequence_parallel=True pipeline.num_microbatches=4 data.global_batch_size=4 "
        f"model.seq_len={length} pipeline.recompute={recompute}",
    )
    for chip, shape in (("v5e", "2x2"), ("v5p", "2x2x1"))
    for recompute in ("none", "full")
    for length in (2048, 8192, 32768)
}
CASES |= LONG

# What backward passes make again (`fiddlex.config.values.recompute`), in cases from above.
AGAIN = [
    ("small, 4 replicas", "gelu"),
    ("small, 4 replicas", "norms"),
    ("small, float32", "gelu,norms"),
    ("small, dropout, selective", "gelu,norms,masks"),
    ("small, dropout, selective", "attention,gelu,norms,masks"),
    ("medium, 1F1B", "gelu,norms"),
    ("medium, ZB-H1, selective", "gelu,norms"),
    ("medium, long sequences, ZB-H2", "gelu"),
    ("large, tensor and sequence parallel", "gelu,norms"),
    ("large, sequence parallel, dropout", "masks"),
    ("large, sequence parallel, dropout", "gelu,norms,masks"),
    ("large, 2BW, interleaved, selective", "gelu,norms"),
    ("xl, 4 replicas", "gelu,norms"),
    ("3.6b, tensor parallel", "gelu,norms"),
    ("7.5b, sequence parallel, selective", "norms"),
    ("39.1b, ZB-H1", "gelu,norms"),
    ("145.6b, interleaved", "gelu,norms"),
    ("175b, sequence parallel, selective", "gelu,norms"),
    ("175b, 2BW", "gelu"),
    ("BERT base, 8 replicas", "masks"),
    ("BERT base, 1F1B, selective", "gelu,norms,masks"),
    ("BERT large, interleaved, no dropout", "gelu,norms"),
    ("BERT large, RACE", "attention,gelu,norms,masks"),
    ("Llama 1b, tensor parallel, selective", "gelu,norms"),
    ("Llama 8b, ZB-H1", "gelu,norms"),
    ("Qwen3 0.6b, 1F1B", "gelu,norms"),
]
REPEATED = {
    f"{name} → {recompute}": CASES[name]._replace(changes=f"{CASES[name].changes} pipeline.recompute={recompute}")
    for name, recompute in AGAIN
}
CASES |= REPEATED

# What that saves of three models, for the table of docs/memory.md.
SAVINGS = {
    f"{name}, {recompute}": case._replace(changes=f"{case.changes} pipeline.recompute={recompute}")
    for name, case, recomputes in [
        ("xl, 1F1B", MemoryCase(GPT_XL, "tpu:v5p:2x2x2", TWO_BY_FOUR), ["none", "gelu,norms"]),
        ("175b, sequence parallel", CASES["175b, sequence parallel, selective"], ["none"]),
        (
            "BERT large, dropout",
            MemoryCase("configs/bert_large.py", "tpu:v5p:2x2x2", TWO_BY_FOUR),
            ["none", "gelu,norms,masks", "attention,gelu,norms,masks"],
        ),
    ]
    for recompute in recomputes
}
CASES |= SAVINGS

# What waits on the hosts, of cases that are also here without
ON_HOSTS = {
    f"{name}, stash on hosts": case._replace(changes=f"{case.changes} pipeline.stash_memory=host")
    for name, case in [
        ("medium, 1F1B", CASES["medium, 1F1B"]),
        ("medium, interleaved, selective", CASES["medium, interleaved, selective"]),
        ("medium, 2BW", MemoryCase(GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.semantics=2bw")),
        ("xl, 1F1B, none", CASES["xl, 1F1B, none"]),
        ("175b, sequence parallel, none", CASES["175b, sequence parallel, none"]),
    ]
}
CASES |= ON_HOSTS

# Master weights and optimizer state in the memory of the host: layouts of one row and of many, every kind of state,
# without a flush, and models that need more of a device than it has without this.
OFFLOAD = {
    f"{name}, offload": case._replace(changes=f"{case.changes} optimizer.offload=true")
    for name, case in [
        ("medium, 1F1B", CASES["medium, 1F1B"]),
        ("xl, 8 replicas", MemoryCase(GPT_XL, "tpu:v5e:2x4", f"{EIGHT_BY_ONE} pipeline.recompute=full")),
        ("xl, Adafactor", CASES["xl, Adafactor"]),
        ("xl, 2BW", CASES["xl, 2BW"]),
        ("7.5b, 2 replicas", MemoryCase("configs/gpt3.py:7.5b", "tpu:v5e:2x4", f"mesh.data=2 {SIXTEEN}")),
        (
            "7.5b, 4 stages",
            MemoryCase("configs/gpt3.py:7.5b", "tpu:v5e:2x4", f"mesh.data=1 mesh.tensor=2 mesh.pipe=4 {SIXTEEN}"),
        ),
        ("18.4b, tensor parallel", CASES["18.4b, tensor parallel"]),
    ]
}
CASES |= OFFLOAD

# Weights and gradients of the layers there too: chunks of one row and of many, with the stash on the device and on
# the host, and a model that more devices than these would hold otherwise.
BREADTH_FIRST = "pipeline.schedule=breadth_first optimizer.offload=true pipeline.weights_memory=host"
STREAMED = {
    f"{name}, weights on hosts": MemoryCase(config, topology, f"{changes} {BREADTH_FIRST}")
    for name, config, topology, changes in [
        ("medium, 6 chunks", GPT_MEDIUM, "tpu:v5e:2x4", f"{TWO_BY_FOUR} pipeline.num_chunks=6"),
        (
            "medium, 3 chunks, stash",
            GPT_MEDIUM,
            "tpu:v5e:2x4",
            f"{TWO_BY_FOUR} pipeline.num_chunks=3 pipeline.stash_memory=host",
        ),
        (
            "xl, 8 replicas, 12 chunks",
            GPT_XL,
            "tpu:v5e:2x4",
            f"{EIGHT_BY_ONE} pipeline.num_chunks=12 pipeline.recompute=full",
        ),
        (
            "7.5b on 4 devices, stash",
            "configs/gpt3.py:7.5b",
            "tpu:v5e:2x2",
            "mesh.data=1 mesh.pipe=2 mesh.tensor=2 pipeline.num_chunks=6 pipeline.stash_memory=host "
            "pipeline.num_microbatches=16 data.global_batch_size=16",
        ),
        (
            "18.4b, Adafactor, stash",
            "configs/gpt3.py:18.4b",
            "tpu:v5p:2x2x2",
            "mesh.data=2 mesh.pipe=2 mesh.tensor=2 pipeline.num_chunks=5 pipeline.stash_memory=host "
            "pipeline.num_microbatches=8 data.global_batch_size=16 optimizer.name=adafactor",
        ),
        (
            "Llama 8b, one rank, stash",
            "configs/llama.py:8b",
            "tpu:v5p:2x2x1",
            "mesh.data=2 mesh.pipe=1 mesh.tensor=2 pipeline.num_chunks=8 pipeline.num_microbatches=8 "
            "data.global_batch_size=16 model.seq_len=2048 pipeline.stash_memory=host pipeline.recompute=none",
        ),
        (
            "BERT large, LAMB",
            "configs/bert_large.py",
            "tpu:v5e:2x4",
            f"{TWO_BY_FOUR} pipeline.num_chunks=3 pipeline.recompute=selective",
        ),
    ]
}
CASES |= STREAMED

# Encoded stashes (`fiddlex.config.values.stash`), in cases from above.
ENCODED = [
    ("medium, 1F1B", "int8"),
    ("xl, 4 replicas", "int8"),
    ("medium, ZB-H1, selective", "float8_e4m3fn"),
    ("small, dropout, selective", "int8"),
    ("large, tensor and sequence parallel", "float8_e4m3fn"),
    ("BERT large, interleaved, no dropout", "int8"),
    ("Llama 8b, ZB-H1", "int8"),
    ("175b, sequence parallel, selective", "int8"),
]
CASES |= {
    f"{name}, {stash_dtype}": CASES[name]._replace(changes=f"{CASES[name].changes} pipeline.stash_dtype={stash_dtype}")
    for name, stash_dtype in ENCODED
}

GPUS_OF_A_HOST = 8


def on_gpus(case: MemoryCase) -> MemoryCase:
    """The same case on as many H100s."""
    number = math.prod(map(int, case.topology.rpartition(":")[2].split("x")))
    hosts = max(number // GPUS_OF_A_HOST, 1)
    return case._replace(topology=f"gpu:h100:{hosts}x{number // hosts}")


# Without a GPU to try them on, XLA finds no tiles for a product with 2,304 columns.
NOT_ON_GPUS = {"BERT 2.2b, 2BW", *LONG}
CASES_ON = {"tpu": CASES, "gpu": {name: on_gpus(case) for name, case in CASES.items() if name not in NOT_ON_GPUS}}
