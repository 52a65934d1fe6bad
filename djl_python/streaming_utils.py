"""Token streaming of a transformers model for dynamic-batch handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from djl_python.lazy_import import require

DEFAULT_MAX_NEW_TOKENS = 50
# What each sampling parameter is where a request has another one.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}


class StreamingUtils:
    """The functions, as customers' handlers import them."""

    DEFAULT_MAX_NEW_TOKENS = DEFAULT_MAX_NEW_TOKENS

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[list[str]]]:
        """`f(model, tokenizer, inputs, device, **parameters)`, which yields the texts of each step, one a prompt.
        Raises ValueError: the engine is not `Accelerate`."""
        if execution_engine != "Accelerate":
            raise ValueError(f"{execution_engine} engine is not supported for streaming")
        return stream_tokens

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **kwargs: Any
    ) -> Iterator[list[str]]:
        """As `get_stream_generator("Accelerate")`, but `kwargs` are those of `generate`, and the prompts come first."""
        return _generate(model, tokenizer, inputs, device, kwargs, skip_special_tokens=True)


def stream_tokens(
    model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **parameters: Any
) -> Iterator[list[str]]:
    """Texts of each step, one for each prompt; a prompt that has finished continues with the padding token's text.

    Takes `max_new_tokens` (50), `do_sample`, `temperature`, `top_k`, `top_p`, `typical_p`, `repetition_penalty` and
    `manual_seed`.

    Raises ValueError: there are no prompts, or a parameter is out of its range.
    """
    if parameters.get("manual_seed") is not None:
        require("torch", "manual_seed").manual_seed(int(parameters["manual_seed"]))
    ends = model.generation_config.eos_token_id
    arguments = {
        "max_new_tokens": int(parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)),
        "repetition_penalty": float(parameters.get("repetition_penalty") or 1.0),
        "num_beams": 1,
        "eos_token_id": tokenizer.eos_token_id if ends is None else ends,
        **_sampling(parameters),
    }
    steps = _generate(model, tokenizer, inputs, device, arguments, skip_special_tokens=False)
    next(steps)  # the prompts
    yield from steps


def _sampling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The likeliest tokens, unless the request has a parameter of sampling."""
    given = {name: parameters[name] for name in _NEUTRAL if parameters.get(name) is not None}
    if given.get("temperature") == 0 or not (given or parameters.get("do_sample")):
        return {"do_sample": False}
    return {"do_sample": True, **_NEUTRAL, **given}


class _Streamer:
    """The streamer for `generate`; those of transformers take only one prompt."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self.texts: SimpleQueue[list[str] | Exception | None] = SimpleQueue()

    def put(self, value: Any) -> None:
        """The prompts' tokens first, then one token of each."""
        rows = value if value.dim() > 1 else value[:, None]
        self.texts.put(self._tokenizer.batch_decode(rows, skip_special_tokens=self._skip_special_tokens))

    def end(self) -> None:
        self.texts.put(None)


def _generate(
    model: Any,
    tokenizer: Any,
    inputs: str | list[str],
    device: Any,
    arguments: Mapping[str, Any],
    skip_special_tokens: bool,
) -> Iterator[list[str]]:
    """The prompts, and then the texts of each step of `generate`, which runs in a thread."""
    prompts = [inputs] if isinstance(inputs, str) else list(inputs)
    if not prompts:
        raise ValueError("Streaming needs at least one prompt")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(device or model.device)
    encoded.pop("token_type_ids", None)
    streamer = _Streamer(tokenizer, skip_special_tokens)
    abandoned = threading.Event()

    def stop_when_abandoned(input_ids: Any, *_: Any, **__: Any) -> Any:
        return input_ids.new_full((input_ids.shape[0],), abandoned.is_set(), dtype=bool)

    def generate() -> None:
        try:
            model.generate(
                **encoded,
                **{"pad_token_id": tokenizer.pad_token_id, **arguments},
                streamer=streamer,
                stopping_criteria=[stop_when_abandoned],
            )
        except Exception as error:  # raised again where the stream is read
            streamer.texts.put(error)

    threading.Thread(target=generate, name="generate", daemon=True).start()
    try:
        while (step := streamer.texts.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step
    finally:
        abandoned.set()
