"""Token streaming of a transformers model for dynamic-batch handlers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from djl_python.lazy_import import require

DEFAULT_MAX_NEW_TOKENS = 50
_PURPOSE = "Token streaming"
_SAMPLING = ("temperature", "top_p", "top_k", "typical_p")


class StreamingUtils:
    """The functions, as customers' handlers import them."""

    DEFAULT_MAX_NEW_TOKENS = DEFAULT_MAX_NEW_TOKENS

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[list[str]]]:
        """`f(model, tokenizer, inputs, device, **parameters)`, which yields the texts of each step, one a prompt.

        Raises:
            ValueError: the engine is not `Accelerate`.
        """
        if execution_engine != "Accelerate":
            raise ValueError(f"{execution_engine} engine is not supported for streaming")
        return stream_tokens

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **kwargs: Any
    ) -> Iterator[list[str]]:
        """As `get_stream_generator("Accelerate")`, by the model's own `generate`; the prompts come first."""
        return _stream_generate(model, tokenizer, _prompts(inputs), device or model.device, kwargs)


def stream_tokens(
    model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **parameters: Any
) -> Iterator[list[str]]:
    """Texts of each step, one for each prompt; a prompt that has finished continues with the padding token's text.

    Takes `max_new_tokens` (50), `do_sample`, `temperature`, `top_k`, `top_p`, `typical_p`, `repetition_penalty` and
    `manual_seed`.

    Raises:
        ValueError: there are no prompts.
    """
    torch = require("torch", _PURPOSE)
    device = device or model.device
    limit = int(parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS))
    encoded = _encode(tokenizer, _prompts(inputs), device)
    sampler = _TokenSampler(parameters, device)
    steps = _Steps(model, encoded)
    ends = _end_tokens(model, tokenizer, device)
    unfinished = torch.ones((encoded["input_ids"].shape[0], 1), dtype=torch.bool, device=device)
    for _ in range(limit):
        with torch.inference_mode():
            tokens = sampler.choose(steps.tokens, steps.logits())
            tokens = torch.where(unfinished, tokens, tokenizer.pad_token_id)
            unfinished &= ~torch.isin(tokens, ends)
            steps.append(tokens)
        yield tokenizer.batch_decode(tokens)
        if not unfinished.any():
            return


class _Steps:
    """The tokens so far, and the logits of the next ones."""

    def __init__(self, model: Any, encoded: Any) -> None:
        self._torch = require("torch", _PURPOSE)
        self._model = model
        self._mask = encoded["attention_mask"]
        self._cache: Any = None
        self._encoder_outputs: Any = None
        self.tokens: Any = encoded["input_ids"]
        self._wants_positions = "position_ids" in inspect.signature(model.forward).parameters
        if model.config.is_encoder_decoder:
            with self._torch.inference_mode():
                self._encoder_outputs = model.get_encoder()(**encoded)
            start = model.generation_config.decoder_start_token_id
            self.tokens = self._torch.full((self.tokens.shape[0], 1), start, device=self.tokens.device)

    def logits(self) -> Any:
        """Logits of the next token of each prompt."""
        known = self.tokens if self._cache is None else self.tokens[:, -1:]
        if self._encoder_outputs is not None:
            inputs = {"decoder_input_ids": known, "encoder_outputs": self._encoder_outputs}
        else:
            inputs = {"input_ids": known} | self._positions(known.shape[1])
        result = self._model(**inputs, attention_mask=self._mask, past_key_values=self._cache, use_cache=True)
        self._cache = result.past_key_values
        return result.logits[:, -1, :].float()

    def append(self, tokens: Any) -> None:
        """Adds one token to each prompt."""
        self.tokens = self._torch.cat([self.tokens, tokens], dim=1)
        if self._encoder_outputs is None:
            self._mask = self._torch.cat([self._mask, self._torch.ones_like(tokens)], dim=1)

    def _positions(self, count: int) -> dict[str, Any]:
        if not self._wants_positions:
            return {}
        # Shorter prompts are padded on the left, and their first token is still at 0.
        return {"position_ids": (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]}


class _TokenSampler:
    """Chooses tokens from logits: the likeliest, or samples where a request asks for it."""

    def __init__(self, parameters: Mapping[str, Any], device: Any) -> None:
        """Raises ValueError for a parameter that is out of its range."""
        self._torch = require("torch", "Sampling")
        asked = any(parameters.get(name) is not None for name in _SAMPLING) or bool(parameters.get("do_sample"))
        self._samples = asked and parameters.get("temperature") != 0
        self._processors = _processors(parameters, self._samples)
        self._generator = None
        if parameters.get("manual_seed") is not None:
            self._generator = self._torch.Generator(device).manual_seed(int(parameters["manual_seed"]))

    def choose(self, tokens: Any, logits: Any) -> Any:
        """The next token of each prompt, as a column; `tokens` are those before it."""
        scores = self._processors(tokens, logits)
        if not self._samples:
            return scores.argmax(-1, keepdim=True)
        return self._torch.multinomial(scores.softmax(-1), num_samples=1, generator=self._generator)


def _processors(parameters: Mapping[str, Any], samples: bool) -> Any:
    transformers = require("transformers", "Sampling")
    chosen = transformers.LogitsProcessorList()
    penalty = parameters.get("repetition_penalty")
    if penalty not in (None, 1.0):
        chosen.append(transformers.RepetitionPenaltyLogitsProcessor(penalty=float(penalty)))
    if not samples:
        return chosen
    temperature, top_k = parameters.get("temperature"), parameters.get("top_k")
    if temperature not in (None, 1.0):
        chosen.append(transformers.TemperatureLogitsWarper(float(temperature)))
    if top_k:
        chosen.append(transformers.TopKLogitsWarper(int(top_k)))
    for name, warper in (("top_p", transformers.TopPLogitsWarper), ("typical_p", transformers.TypicalLogitsWarper)):
        value = parameters.get(name)
        if value is not None and value < 1.0:
            chosen.append(warper(float(value)))
    return chosen


class _Streamer:
    """The streamer for `generate`; those of transformers take only one prompt."""

    def __init__(self, tokenizer: Any, texts: SimpleQueue[Any]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts

    def put(self, value: Any) -> None:
        """The prompts' tokens first, then one token of each."""
        rows = value if value.dim() > 1 else value[:, None]
        self._texts.put(self._tokenizer.batch_decode(rows, skip_special_tokens=True))

    def end(self) -> None:
        """No more tokens."""
        self._texts.put(None)


def _stream_generate(
    model: Any, tokenizer: Any, prompts: list[str], device: Any, parameters: dict[str, Any]
) -> Iterator[list[str]]:
    encoded = _encode(tokenizer, prompts, device)
    texts: SimpleQueue[Any] = SimpleQueue()
    abandoned = threading.Event()

    def stop_when_abandoned(input_ids: Any, *_: Any, **__: Any) -> Any:
        return input_ids.new_full((input_ids.shape[0],), abandoned.is_set(), dtype=bool)

    def generate() -> None:
        try:
            model.generate(
                **encoded, streamer=_Streamer(tokenizer, texts), stopping_criteria=[stop_when_abandoned], **parameters
            )
        except Exception as error:  # raised again where the stream is read
            texts.put(error)

    threading.Thread(target=generate, name="generate", daemon=True).start()
    try:
        while (step := texts.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step
    finally:
        abandoned.set()


def _prompts(inputs: str | list[str]) -> list[str]:
    prompts = [inputs] if isinstance(inputs, str) else list(inputs)
    if not prompts:
        raise ValueError("Streaming needs at least one prompt")
    return prompts


def _encode(tokenizer: Any, prompts: list[str], device: Any) -> dict[str, Any]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _end_tokens(model: Any, tokenizer: Any, device: Any) -> Any:
    torch = require("torch", _PURPOSE)
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return torch.tensor([] if ends is None else ends, dtype=torch.long, device=device)
