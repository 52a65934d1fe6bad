"""Pipelines of the built-in Hugging Face handler: generation in padded batches, other tasks by transformers.

Source: contracts/lmi.md sections 2.13 and 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from djl_python.huggingface_settings import HuggingFaceSettings
from djl_python.lazy_import import require

_PURPOSE = "HuggingFaceService"
TEXT_GENERATION = "text-generation"
TEXT_TO_TEXT = "text2text-generation"
QUESTION_ANSWERING = "question-answering"
_TASK_OF_SUFFIX = {
    "TapasForQuestionAnswering": "table-question-answering",
    "ForQuestionAnswering": QUESTION_ANSWERING,
    "ForTokenClassification": "token-classification",
    "ForSequenceClassification": "text-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": TEXT_GENERATION,
    "LMHeadModel": TEXT_GENERATION,
    "BloomModel": TEXT_GENERATION,
    "ForConditionalGeneration": TEXT_TO_TEXT,
    "MTModel": TEXT_TO_TEXT,
    "EncoderDecoderModel": TEXT_TO_TEXT,
    "T5WithLMHeadModel": TEXT_TO_TEXT,
}
_MAX_ANSWER_TOKENS = 15


def infer_task(settings: HuggingFaceSettings) -> str:
    """The task that the model's architecture is made for. Raises ValueError if that is not known."""
    config = require("transformers", _PURPOSE).AutoConfig.from_pretrained(
        settings.model, trust_remote_code=settings.trust_remote_code, revision=settings.revision
    )
    architecture = next(iter(config.architectures or ()), "")
    for suffix, task in _TASK_OF_SUFFIX.items():
        if architecture.endswith(suffix):
            return task
    raise ValueError(f"The task of the architecture {architecture!r} is not known; option.task must be given")


def build_pipeline(task: str, settings: HuggingFaceSettings) -> Any:
    """A callable `f(list of inputs, **parameters)` with attributes `model` and `tokenizer`.

    Raises:
        ValueError: transformers knows no such task.
    """
    transformers = require("transformers", _PURPOSE)
    if task == TEXT_GENERATION:
        return GenerationPipeline(transformers.AutoModelForCausalLM, settings, padding_side="left")
    if task == TEXT_TO_TEXT:
        return GenerationPipeline(transformers.AutoModelForSeq2SeqLM, settings, padding_side="right")
    if task == QUESTION_ANSWERING:
        return QuestionAnsweringPipeline(settings)
    known = transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks()
    if task not in known:
        raise ValueError(f"Unknown task {task!r}; transformers {transformers.__version__} knows {', '.join(known)}")
    loading = dict(settings.loading)
    place = {} if "device_map" in loading else {"device": settings.device}
    arguments = {name: loading.pop(name) for name in ("dtype", "device_map") if name in loading}
    return transformers.pipeline(
        task,
        model=settings.model,
        trust_remote_code=settings.trust_remote_code,
        revision=settings.revision,
        model_kwargs=loading,
        **arguments,
        **place,
    )


def load(model_class: Any, settings: HuggingFaceSettings) -> tuple[Any, Any]:
    """The model, ready for inference on its device, and its tokenizer, which can pad."""
    transformers = require("transformers", _PURPOSE)
    source = {"trust_remote_code": settings.trust_remote_code, "revision": settings.revision}
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model, **source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model_class.from_pretrained(settings.model, **source, **settings.loading)
    return (model if "device_map" in settings.loading else model.to(settings.device)).eval(), tokenizer


class GenerationPipeline:
    """Text generation: all prompts as one padded batch. The text of a causal model begins with its prompt."""

    def __init__(self, model_class: Any, settings: HuggingFaceSettings, padding_side: str) -> None:
        self.model, self.tokenizer = load(model_class, settings)
        self._padding_side = padding_side
        self._stop = {"stop_strings": list(settings.stop_strings)} if settings.stop_strings else {}

    def __call__(self, prompts: Sequence[str], **parameters: Any) -> list[dict[str, str]]:
        """One `{"generated_text": ...}` a prompt; parameters go to `generate`, which raises ValueError."""
        torch = require("torch", _PURPOSE)
        encoded = self.tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side=self._padding_side).to(
            self.model.device
        )
        encoded.pop("token_type_ids", None)
        arguments = {"pad_token_id": self.tokenizer.pad_token_id} | self._stop | parameters
        if "stop_strings" in arguments:
            arguments["tokenizer"] = self.tokenizer
        with torch.inference_mode():
            generated = self.model.generate(**encoded, **arguments)
        return [{"generated_text": text} for text in self.tokenizer.batch_decode(generated, skip_special_tokens=True)]


class QuestionAnsweringPipeline:
    """Extractive question answering, which newer versions of transformers have no pipeline for."""

    def __init__(self, settings: HuggingFaceSettings) -> None:
        model_class = require("transformers", _PURPOSE).AutoModelForQuestionAnswering
        self.model, self.tokenizer = load(model_class, settings)

    def __call__(self, inputs: Sequence[Any], max_answer_len: int = _MAX_ANSWER_TOKENS) -> Any:
        """`{"score", "start", "end", "answer"}` of each `{"question", "context"}`; not in a list if there is one.

        Raises:
            ValueError: an input is something else.
        """
        answers = [self._answer(each, max_answer_len) for each in inputs]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, pair: Any, max_answer_len: int) -> dict[str, Any]:
        torch = require("torch", _PURPOSE)
        if not isinstance(pair, dict) or not all(isinstance(pair.get(name), str) for name in ("question", "context")):
            raise ValueError("Question answering needs objects with the strings 'question' and 'context'")
        encoded = self.tokenizer(
            pair["question"],
            pair["context"],
            return_tensors="pt",
            truncation="only_second",
            return_offsets_mapping=True,
        )
        offsets = encoded.pop("offset_mapping")[0].tolist()
        outside = torch.tensor([part != 1 for part in encoded.sequence_ids(0)])
        if outside.all():
            raise ValueError("The context is empty, or the question leaves no room for it")
        with torch.inference_mode():
            result = self.model(**encoded.to(self.model.device))
        starts, ends = (
            logits[0].float().cpu().masked_fill(outside, float("-inf")).softmax(-1)
            for logits in (result.start_logits, result.end_logits)
        )
        # Of all spans that do not end before they start, and are not too long, the likeliest.
        scores = torch.outer(starts, ends).triu().tril(max_answer_len - 1)
        start, end = divmod(int(scores.argmax()), scores.shape[1])
        first, last = offsets[start][0], offsets[end][1]
        answer = pair["context"][first:last]
        return {"score": float(scores[start, end]), "start": first, "end": last, "answer": answer}
