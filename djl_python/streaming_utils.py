"""Token streaming with a transformers model, for handlers with dynamic batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from djl_python.lazy_import import require

DEFAULT_MAX_NEW_TOKENS = 50
# If a request sets one of these sampling parameters, or `do_sample`, the others have these defaults.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}


class StreamingUtils:
    """The functions of this module, under the names that customers' handlers use."""

    DEFAULT_MAX_NEW_TOKENS = DEFAULT_MAX_NEW_TOKENS

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[list[str]]]:
        """Return a function `f(model, tokenizer, inputs, device, **parameters)`.

        At each step, the function yields a list of texts, one for each prompt.

        Raises:
            ValueError: The engine is not `Accelerate`.
        """
        if execution_engine != "Accelerate":
            raise ValueError(f"{execution_engine} engine is not supported for streaming")
        return stream_tokens

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **kwargs: Any
    ) -> Iterator[list[str]]:
        """Yield the prompts, and then the texts of each step. `kwargs` are arguments for transformers' `generate`."""
        return _generate(model, tokenizer, inputs, device, kwargs, skip_special_tokens=True)


def stream_tokens(
    model: Any, tokenizer: Any, inputs: str | list[str], device: Any = None, **parameters: Any
) -> Iterator[list[str]]:
    """Yield a list of texts at each step, one for each prompt.

    The text of a finished prompt is the padding token's text, until all prompts have finished.

    Args:
        device: The device for the encoded prompts. The default is the model's device.
        parameters: `max_new_tokens` (default 50), `do_sample`, `temperature`, `top_k`, `top_p`, `typical_p`,
            `repetition_penalty` and `manual_seed`.

    Raises:
        ValueError: `inputs` is empty, or a parameter is out of range.
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
    next(steps)  # Skip the prompts.
    yield from steps


def _sampling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for sampling. If no sampling parameter is set, the most likely token is chosen."""
    given = {name: parameters[name] for name in _NEUTRAL if parameters.get(name) is not None}
    if given.get("temperature") == 0 or not (given or parameters.get("do_sample")):
        return {"do_sample": False}
    return {"do_sample": True, **_NEUTRAL, **given}


class _Streamer:
    """A streamer for `generate` with several prompts. transformers' own streamers support only one prompt."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self.texts: SimpleQueue[list[str] | Exception | None] = SimpleQueue()

    def put(self, value: Any) -> None:
        """Receive the prompts' tokens in the first call, and one token for each prompt in later calls."""
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
    """Run `generate` in a thread. Yield the prompts, and then the texts of each step."""
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
        except Exception as error:  # The thread that reads the stream raises this exception.
            streamer.texts.put(error)

    threading.Thread(target=generate, name="generate", daemon=True).start()
    try:
        while (step := streamer.texts.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step
    finally:
        abandoned.set()
