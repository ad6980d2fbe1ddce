"""gpt_tiny's width under each pipeline schedule, for comparing them: eight layers, with the same losses under each.

Each on a pipe of four ranks with eight microbatches; `uneven` cuts ten layers into stages of different sizes. `2bw`
goes on from batch to batch with weights one update old, and so has losses of its own. For a table or a function of your
own add --config.pipeline.schedule=file:PATH.csv or PATH.py:FUNCTION.

    python experiments/train.py --config=configs/schedules.py:zb_h1 --workdir=/tmp/zb_h1
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

# Mesh (data, pipe), pipeline, layers of the model.
LAYOUTS = {
    "gpipe": ((1, 4), PipelineConfig(schedule="gpipe", num_microbatches=8), 8),
    "1f1b": ((1, 4), PipelineConfig(schedule="1f1b", num_microbatches=8), 8),
    "interleaved_1f1b": ((1, 4), PipelineConfig(schedule="interleaved_1f1b", num_chunks=2, num_microbatches=8), 8),
    "breadth_first": ((1, 4), PipelineConfig(schedule="breadth_first", num_chunks=2, num_microbatches=8), 8),
    "zb_h1": ((1, 4), PipelineConfig(schedule="zb_h1", num_microbatches=8), 8),
    "zb_h2": ((1, 4), PipelineConfig(schedule="zb_h2", num_microbatches=8), 8),
    "zb_v": ((1, 4), PipelineConfig(schedule="zb_v", num_chunks=2, num_microbatches=8), 8),
    "v_half": ((1, 4), PipelineConfig(schedule="v_half", num_chunks=2, num_microbatches=8), 8),
    "v_min": ((1, 4), PipelineConfig(schedule="v_min", num_chunks=2, num_microbatches=8), 8),
    "dual_pipe_v": ((1, 4), PipelineConfig(schedule="dual_pipe_v", num_chunks=2, num_microbatches=8), 8),
    "uneven": ((2, 4), PipelineConfig(schedule="1f1b", num_microbatches=8, layers_per_stage="2,3,3,2"), 10),
    "2bw": ((1, 4), PipelineConfig(num_microbatches=8, semantics="2bw"), 8),
    "recompute": ((1, 4), PipelineConfig(schedule="1f1b", num_microbatches=8, recompute="full"), 8),
}


ARGUMENTS = tuple(LAYOUTS)


def get_config(name: str) -> Config:
    (data, pipe), pipeline, num_layers = LAYOUTS[name]
    return Config(
        model=ModelConfig(num_layers=num_layers, hidden_size=128, num_heads=4, vocab_size=256, seq_len=128),
        mesh=MeshConfig(data=data, pipe=pipe),
        pipeline=pipeline,
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-3, warmup_steps=50, weight_decay=0.1, clip_norm=1.0),
        data=DataConfig(source="stdlib", global_batch_size=16),
        train=TrainConfig(num_steps=200, log_every=20, eval_every=200, checkpoint_every=100),
    )
