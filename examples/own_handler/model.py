"""A handler: scores texts with a language model of Hugging Face. A likely text has a higher score.

The score is the mean log probability of a token.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from djl_python import Input, Output


class Scorer:
    def __init__(self, model_id: str, device: int) -> None:
        self.device = "cpu" if device < 0 else f"cuda:{device}"
        self.tokenizer = AutoTokenizer.from_pretrained(model_id)
        self.model = AutoModelForCausalLM.from_pretrained(model_id).to(self.device).eval()

    @torch.inference_mode()
    def score(self, text: str) -> float:
        # The first token has no probability, so a line feed comes first.
        ids = self.tokenizer("\n" + text, return_tensors="pt").input_ids.to(self.device)
        return -self.model(ids, labels=ids).loss.item()


scorer = None


def handle(inputs: Input) -> Output | None:
    global scorer
    if inputs.is_empty():  # The first call, without a request: load the model.
        scorer = Scorer(inputs.get_property("model_id"), int(inputs.get_property("device_id")))
        return None
    body = inputs.get_as_json()
    texts = body.get("texts")
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        return Output().error("`texts` must be an array of texts", code=400)
    results = ({"text": text, "score": round(scorer.score(text), 1)} for text in texts)
    if body.get("stream"):
        lines = (json.dumps(result) + "\n" for result in results)
        return Output().add_property("Content-Type", "application/jsonlines").add_stream_content(lines, None)
    return Output().add({"results": list(results)})
