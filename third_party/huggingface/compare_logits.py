"""Compares logits and losses with those of Hugging Face's transformers, on random models.

    pip install transformers torch
    python -m third_party.huggingface.compare_logits

For each model of `comparison.py` it prints the largest difference of the logits relative to the largest logit, and of
the loss relative to the loss, on one device and on data=2 × pipe=2 × tensor=2 with two chunks.
"""

from fiddlex.cluster.mesh import request_devices
from third_party.huggingface.comparison import LAYOUTS, MODELS, compare, random_model


def main() -> None:
    """Prints a table, one line for each model."""
    request_devices(8)
    heads = [f"{what}, {layout}" for layout in LAYOUTS for what in ("logits", "loss")]
    print("| model | " + " | ".join(heads) + " |\n|---|" + "---:|" * len(heads))
    for name in MODELS:
        found = [compare(random_model(name), changes) for changes in LAYOUTS.values()]
        print(f"| {name} | " + " | ".join(f"{value:.1e}" for each in found for value in each) + " |", flush=True)


if __name__ == "__main__":
    main()
