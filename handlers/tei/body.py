"""The bodies of TEI's routes, and the texts in them.

Source: TEI's router 1.9, `src/http/types.rs`, and `core/src/tokenization.rs`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from engines.errors import InvalidRequest
from engines.loaded_model import LoadedModel, ModelTexts
from engines.pooling import Pooling, PoolingModel, Side
from engines.request import GenerationRequest, pooling_request
from handlers.model_config import ModelConfig
from handlers.parsing.axum import wrong_shape
from handlers.tei.errors import TeiRefusal, empty

CHARACTERS_PER_TOKEN = 250  # A text may have this many characters for each token that fits into the model's context.

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Direction = Literal["left", "Left", "right", "Right"]
Prompt = str | tuple[int, ...]  # A text, or token ids.
Pair = tuple[str, str | None]  # A text and None, or a pair of texts.


class _Cut(msgspec.Struct, frozen=True, kw_only=True):
    truncate: bool | None = None
    truncation_direction: Direction = "right"


class EmbedAllBody(_Cut, frozen=True, kw_only=True):
    """The body of /embed_all and /embed_sparse."""

    inputs: str | list[str | TokenId | list[TokenId]]
    prompt_name: str | None = None


class EmbedBody(EmbedAllBody, frozen=True, kw_only=True):
    """The body of /embed."""

    normalize: bool = True
    dimensions: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RerankBody(_Cut, frozen=True, kw_only=True):
    """The body of /rerank."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class PredictBody(_Cut, frozen=True, kw_only=True):
    """The body of /predict."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False


class SimilarityInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of /similarity."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(_Cut, frozen=True, kw_only=True):
    """The `parameters` of /similarity."""

    prompt_name: str | None = None


class SimilarityBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /decode."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = True


def prompts_of(inputs: Any) -> tuple[Sequence[Prompt], bool]:
    """Return the prompts of `inputs`, and whether they are a batch.

    Raises:
        ContractError: A list mixes token ids with texts or lists.
    """
    if isinstance(inputs, str):
        return [inputs], False
    if all(isinstance(item, int) for item in inputs):
        return [tuple(inputs)], False
    if any(isinstance(item, int) for item in inputs):
        raise wrong_shape("inputs: expected a text, token ids, or a list of texts and lists of token ids")
    return [item if isinstance(item, str) else tuple(item) for item in inputs], True


def pairs_of(inputs: Any) -> tuple[Sequence[Pair], bool]:
    """Return the texts and pairs in the `inputs` of /predict, and whether they are a batch.

    Raises:
        ContractError: `inputs` is not a text, a pair of texts, or a list of texts and pairs.
    """
    if isinstance(inputs, str):
        return [(inputs, None)], False
    if all(isinstance(item, str) for item in inputs):
        return [_pair(inputs)], False
    if any(isinstance(item, str) for item in inputs):
        raise _wrong_pair()
    return [_pair(item) for item in inputs], True


def _pair(texts: Sequence[str]) -> Pair:
    if len(texts) not in (1, 2):
        raise _wrong_pair()
    return texts[0], texts[1] if len(texts) == 2 else None


def _wrong_pair() -> Exception:
    return wrong_shape(
        "inputs: expected a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
        "[[string], [string, string], ...]"
    )


def cut_of(body: _Cut, config: ModelConfig) -> Side | None:
    """Return the side from which long texts are truncated. None means that long texts are refused."""
    if not (config.tei.auto_truncate if body.truncate is None else body.truncate):
        return None
    return "left" if body.truncation_direction.lower() == "left" else "right"


def check_batch(size: int, config: ModelConfig) -> None:
    """Check the number of texts.

    Raises:
        TeiRefusal: There are too many texts.
    """
    if size > config.tei.max_client_batch_size:
        raise TeiRefusal(
            "Validation", f"batch size {size} > maximum allowed batch size {config.tei.max_client_batch_size}"
        )


def check_length(characters: int, model: LoadedModel) -> None:
    """Check the length of a text that must not be truncated.

    Raises:
        InvalidRequest: The text has more than `CHARACTERS_PER_TOKEN` characters for each token of the model's context.
    """
    limit = model.max_model_len * CHARACTERS_PER_TOKEN
    if characters > limit:
        raise InvalidRequest(f"`inputs` must have less than {limit} characters. Given: {characters}")


def text_in_front(prompt_name: str | None, model: PoolingModel | None) -> str | None:
    """Return the text to put before a prompt. None if neither the request nor the model names such a prefix.

    Raises:
        InvalidRequest: The model has no prefix with this name.
    """
    prompts = model.prompts if model is not None else {}
    if prompt_name is None:
        return model.default_prompt if model is not None else None
    if not prompts:
        raise InvalidRequest(
            f"`default-prompt-name` is set to `{prompt_name}` but no prompts were found in the Sentence Transformers "
            "configuration"
        )
    if prompt_name not in prompts:
        raise InvalidRequest(
            f"`default-prompt-name` is set to `{prompt_name}` but it was not found in the Sentence Transformers "
            f"prompts. Available prompts: {json.dumps(list(prompts), ensure_ascii=False)}"
        )
    return prompts[prompt_name]


def request_for(prompt: Prompt, front: str | None, pooling: Pooling, model: LoadedModel) -> GenerationRequest:
    """Return the request for a text or for token ids.

    As in TEI, token ids are decoded and tokenized again. Special tokens are added to them only if there is a prefix.

    Raises:
        InvalidRequest: The prompt is empty or too long, or its ids are not valid tokens.
    """
    if not prompt:
        raise empty("inputs")
    if pooling.cut is None:
        check_length(len(prompt), model)
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else decoded(prompt, model.texts, skip_special=front is not None)
    return pooling_request((front or "") + text, pooling, add_special_tokens=is_text or front is not None)


def request_for_pair(pair: Pair, front: str | None, pooling: Pooling, model: LoadedModel) -> GenerationRequest:
    """Return the request for a text or a pair of texts.

    Raises:
        InvalidRequest: The texts are empty or too long.
        TeiRefusal: The model's default prefix would be put before a pair of texts.
    """
    first, second = pair
    if second is not None and front is not None:
        raise TeiRefusal("Validation", "`prompt_name` cannot be set with dual inputs")
    if not first and not second:
        raise empty("inputs")
    if pooling.cut is None:
        check_length(len(first) + len(second or ""), model)
    return pooling_request((front or "") + first, msgspec.structs.replace(pooling, second=second))


def decoded(ids: Sequence[int], texts: ModelTexts, *, skip_special: bool) -> str:
    """Return the text of token ids.

    Raises:
        TeiRefusal: The tokenizer cannot decode them.
    """
    try:
        return texts.decode(ids, skip_special=skip_special)
    except Exception as error:  # A tokenizer may raise any exception.
        raise TeiRefusal("Tokenizer", f"tokenizer error {error}") from error
