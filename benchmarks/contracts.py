"""The same load in the words of each wire contract that Slipway speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MODEL = "m"
"""What every server is told to call its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How one contract asks for a load, and how its answers are known to be whole."""

    path: str
    body: dict[str, object]
    marker: str = ""
    """In each record of a stream once; empty where there is none."""
    end_marker: str
    """In the last bytes of an answer that has all its tokens."""
    exact_records: bool = False
    """A stream has exactly one record for each token."""


def lmi(prompt: str, tokens: int, stream: bool, logprobs: bool) -> Wording:
    """LMI's rolling batch."""
    parameters: dict[str, object] = {"max_new_tokens": tokens, "ignore_eos_token": True}
    if stream and not logprobs:
        parameters["token_logprobs"] = False
    body: dict[str, object] = {"inputs": prompt, "parameters": parameters}
    if stream:
        body["stream"] = True
    return Wording(
        path="/invocations",
        body=body,
        marker='"token": {' if stream else "",
        end_marker='"generated_text"',
        exact_records=stream,
    )


def openai(prompt: str, tokens: int, stream: bool, logprobs: bool) -> Wording:
    """OpenAI's completions, with vLLM's own parameters."""
    body: dict[str, object] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream}
    if logprobs:
        body["logprobs"] = 0  # of the tokens chosen, and no alternatives: what LMI's streams show
    return Wording(
        path="/v1/completions",
        body=body,
        marker="data: {" if stream else "",
        # With the end of sequence ignored, only the limit on tokens ends an answer, so it has exactly that many.
        end_marker='"finish_reason":"length"',
    )


def triton(prompt: str, tokens: int, stream: bool, logprobs: bool) -> Wording:
    """Triton's generate extension, as vLLM's backend for it takes it."""
    body: dict[str, object] = {"text_input": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": stream, "return_finish_reason": True}
    if logprobs:
        body |= {"logprobs": 0, "return_logprobs": True}
    return Wording(
        path=f"/v2/models/{MODEL}/generate{'_stream' if stream else ''}",
        body=body,
        marker="data: {" if stream else "",
        end_marker='"finish_reason":"length"',
        exact_records=stream,
    )


def happy_vllm(prompt: str, tokens: int, stream: bool, logprobs: bool) -> Wording:
    """happy_vllm's generate, whose streams repeat the whole text with each token."""
    return Wording(
        path=f"/v1/generate{'_stream' if stream else ''}",
        body={"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0},
        marker='"responses"' if stream else "",
        end_marker='["length"]',
        exact_records=stream,
    )


def tgi(prompt: str, tokens: int, stream: bool, logprobs: bool) -> Wording:
    """TGI's generate; it cannot ignore the end of sequence, so a model that ends early makes errors here."""
    return Wording(
        path=f"/generate{'_stream' if stream else ''}",
        body={"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}},
        marker='"token":{' if stream else "",
        end_marker='"finish_reason":"length"' if stream else '"details":{',
        exact_records=stream,
    )


CONTRACTS: dict[str, Callable[[str, int, bool, bool], Wording]] = {
    "lmi": lmi,
    "openai": openai,
    "triton": triton,
    "happy_vllm": happy_vllm,
    "tgi": tgi,
}
WITH_LOGPROBS = frozenset({"lmi", "openai", "triton"})
"""Contracts whose streams can do without log probabilities, and are measured with them as well."""
ALWAYS_LOGPROBS = frozenset({"tgi"})
