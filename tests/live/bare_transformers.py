"""Computes vectors and scores of texts with transformers, without vLLM and Slipway."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.live.preloaded import answer_order, result_of


class Job(NamedTuple):
    """Texts, or pairs of texts, for a model."""

    model: Path  # The directory of the model.
    texts: list[Any]
    # "cls" or "mean": one vector of all tokens. "tokens": a vector of each token, as ColBERT projects them. "head": the
    # model's own logits.
    pooling: str = "cls"


def numbers_of_transformers(**jobs: Job) -> dict[str, list[Any]]:
    """Return the vector or scores of each text of each job. One new process computes all of them."""
    given = {name: (str(job.model), job.pooling, job.texts) for name, job in jobs.items()}
    numbers: dict[str, list[Any]] = result_of(__name__, given)
    return numbers


def _numbers_of(model: str, pooling: str, texts: list[Any]) -> list[Any]:
    import torch
    from safetensors import safe_open
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kind = AutoModelForSequenceClassification if pooling == "head" else AutoModel
    network = kind.from_pretrained(model, dtype=torch.float32).eval()
    if pooling == "tokens":
        with safe_open(f"{model}/model.safetensors", "pt") as file:
            projection = file.get_tensor("linear.weight").T
    numbers = []
    with torch.inference_mode():
        for text in texts:
            given = [text] if isinstance(text, str) else text
            output = network(**tokenizer(*given, return_tensors="pt"))
            if pooling == "head":
                numbers.append(output.logits[0].tolist())
                continue
            states = output.last_hidden_state[0]
            match pooling:
                case "cls":
                    vectors = states[0]
                case "mean":
                    vectors = states.mean(0)
                case "tokens":
                    vectors = states @ projection
            numbers.append((vectors / vectors.norm(dim=-1, keepdim=True)).tolist())
    return numbers


if __name__ == "__main__":
    answer_order(lambda jobs: {name: _numbers_of(*job) for name, job in jobs.items()})
