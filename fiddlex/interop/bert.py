"""The classes of BERT in transformers that fiddlex computes: pretraining, masked language model, classification.

`seq_relationship` scores a pair's classes in the opposite order: there class 0 means that the second text follows the
first (`mlm_nsp`) or that both are in order (`mlm_sop`), and here class 1 does.
"""

from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.architecture import FIXED, Architecture, Part, dropout, gelu, gelu_name, in_layers, linear, norm
from fiddlex.interop.options import Json, Options
from fiddlex.terminal.readable import shown

OBJECTIVES = {
    "BertForPreTraining": "mlm_nsp",
    "BertForMaskedLM": "mlm",
    "BertForSequenceClassification": "classification",
}
MOST_CLASSES = 100_000  # far above any in use
_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    **dict.fromkeys(_RATES, 0.1),
}


def bert_model(options: Options) -> ModelConfig:
    own_rate = options.values.get("classifier_dropout") is not None  # else it is that of the hidden layers
    return ModelConfig(
        family="bert",
        objective=OBJECTIVES[options.values["architectures"][0]],
        num_layers=options.size("num_hidden_layers"),
        hidden_size=options.size("hidden_size"),
        num_heads=options.size("num_attention_heads"),
        ffn_size=options.size("intermediate_size"),
        vocab_size=options.size("vocab_size"),
        seq_len=options.size("max_position_embeddings"),
        dropout=dropout(options, *_RATES, *(["classifier_dropout"] if own_rate else [])),
        post_norm=True,
        layer_norm_epsilon=options.number("layer_norm_eps"),
        gelu=gelu(options, "hidden_act"),
        init_std=options.number("initializer_range"),
    )


def bert_json(config: Config) -> Json:
    model = config.model
    if not model.post_norm:
        raise ConfigError("model.post_norm=False: the classes of BERT in transformers have LayerNorm after each sum.")
    fields: Json = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.seq_len,
        "type_vocab_size": 2,
        "layer_norm_eps": model.layer_norm_epsilon,
        "hidden_act": gelu_name(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "classifier_dropout": None,
        **dict.fromkeys(_RATES, model.dropout),
    }
    if classes := config.data.classes:
        fields["id2label"] = {str(i): name for i, name in enumerate(classes)}
        fields["label2id"] = {name: i for i, name in enumerate(classes)}
    return fields


def bert_parts(model: ModelConfig) -> list[Part]:
    """The tensors of a BERT; queries, keys and values are three tensors there and one kernel here."""
    heads = [
        Part(f"attention.self.{name}.{kind}", ("layers", "attention", "qkv", ours), kind == "weight", slice=(dim, i))
        for i, name in enumerate(("query", "key", "value"))
        for kind, ours, dim in (("weight", "kernel", 1), ("bias", "bias", 0))
    ]
    layer = (
        *heads,
        *linear("attention.output.dense", ("layers", "attention", "out"), transposed=True),
        *norm("attention.output.LayerNorm", ("layers", "attention_norm")),
        *linear("intermediate.dense", ("layers", "mlp", "up"), transposed=True),
        *linear("output.dense", ("layers", "mlp", "down"), transposed=True),
        *norm("output.LayerNorm", ("layers", "mlp_norm")),
    )
    return [
        Part("bert.embeddings.word_embeddings.weight", ("embedding", "tokens")),
        Part("bert.embeddings.position_embeddings.weight", ("embedding", "positions")),
        Part("bert.embeddings.token_type_embeddings.weight", ("embedding", "token_types")),
        *norm("bert.embeddings.LayerNorm", ("embedding", "norm")),
        *in_layers("bert.encoder.layer", layer),
        *_head(model.task),
    ]


def _head(task: str) -> list[Part]:
    masked, label = ("head", "masked"), ("head", "label")
    found: list[Part] = []
    if task != "mlm":
        found += linear("bert.pooler.dense", (*label, "pooler"), transposed=True)
    if task == "classification":
        return [*found, *linear("classifier", (*label, "classifier"), transposed=True)]
    found += [
        Part("cls.predictions.bias", (*masked, "bias")),
        *linear("cls.predictions.transform.dense", (*masked, "transform"), transposed=True),
        *norm("cls.predictions.transform.LayerNorm", (*masked, "norm")),
    ]
    if task != "mlm":
        found += [
            Part("cls.seq_relationship.weight", (*label, "classifier", "kernel"), True, classes_reversed=True),
            Part("cls.seq_relationship.bias", (*label, "classifier", "bias"), classes_reversed=True),
        ]
    return found


def bert_classes(json: Json) -> tuple[str, ...]:
    """The names of the classes, which become `data.labels`."""
    named, number = json.get("id2label"), json.get("num_labels", 2)
    if named is None and type(number) is int and number <= MOST_CLASSES:
        named = {str(i): f"LABEL_{i}" for i in range(number)}
    names: list[Any] = [named.get(str(i)) for i in range(len(named))] if isinstance(named, dict) else []
    fit = 1 < len(names) <= MOST_CLASSES and json.get("num_labels", len(names)) == len(names)
    fit = fit and all(isinstance(name, str) and name and name == name.strip() and "," not in name for name in names)
    if not fit or len(set(names)) < len(names):
        raise ConfigError(
            f"id2label={shown(json.get('id2label'))}, num_labels={shown(json.get('num_labels'))}: fiddlex computes a "
            f"classification with 2 to {MOST_CLASSES} classes, numbered from 0, whose names differ and have no comma "
            "and no space at either end, since data.labels lists them. Rename them in id2label, and remove num_labels "
            "or make it their number."
        )
    return tuple(names)


def _bert(name: str, **fields: Any) -> Architecture:
    fixed = {
        **FIXED,
        "position_embedding_type": ("absolute",),
        "type_vocab_size": (2,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        **fields.pop("fixed", {}),
    }
    return Architecture(
        name,
        "bert",
        bert_model,
        bert_json,
        bert_parts,
        _DEFAULTS,
        fixed,
        prefix="bert.",
        older_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ignored=("embeddings.position_ids",),
        **fields,
    )


_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BERTS = (
    _bert("BertForPreTraining", copies=_COPIES),
    _bert(
        "BertForMaskedLM",
        copies=_COPIES,
        unused=("bert.pooler.",),
        wider=("cls.seq_relationship.weight", "BertForPreTraining"),
    ),
    _bert(
        "BertForSequenceClassification",
        fixed={"problem_type": (None, "single_label_classification")},
        classes_of=bert_classes,
    ),
)
