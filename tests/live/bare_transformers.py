"""Prints the numbers that transformers, without vLLM and Slipway, makes of texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """Texts, or pairs of texts, for a model."""

    model: Path  # The directory of the model.
    texts: list[Any]
    # The way from the tokens' vectors to one: "cls" or "mean". "head": the model's own logits.
    pooling: str = "cls"


def numbers_of_transformers(**jobs: Job) -> dict[str, list[list[float]]]:
    """Return the numbers for each text of each job. All come from one new process, whose imports take long."""
    given = {name: (str(job.model), job.pooling, job.texts) for name, job in jobs.items()}
    command = [sys.executable, __file__, json.dumps(given)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    numbers: dict[str, list[list[float]]] = json.loads(finished.stdout.splitlines()[-1])
    return numbers


def numbers_of(model: str, pooling: str, texts: list[Any]) -> list[list[float]]:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kind = AutoModelForSequenceClassification if pooling == "head" else AutoModel
    network = kind.from_pretrained(model, dtype=torch.float32).eval()
    numbers = []
    with torch.inference_mode():
        for text in texts:
            given = [text] if isinstance(text, str) else text
            output = network(**tokenizer(*given, return_tensors="pt"))
            if pooling == "head":
                numbers.append(output.logits[0].tolist())
                continue
            states = output.last_hidden_state[0]
            vector = states[0] if pooling == "cls" else states.mean(0)
            numbers.append((vector / vector.norm()).tolist())
    return numbers


if __name__ == "__main__":
    print(json.dumps({name: numbers_of(*job) for name, job in json.loads(sys.argv[1]).items()}))
