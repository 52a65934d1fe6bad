"""Makes the prompts of common chats and of batches of chats.

`chat_renderer` repeats the steps in which `OnlineRenderer.preprocess_chat` makes a prompt from messages
(tests/live/test_openai_internals.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from typing import Any

import vllm.tokenizers.hf
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template,
    resolve_chat_template_content_format,
    resolve_chat_template_kwargs,
)

logger = logging.getLogger(__name__)

# Chats that are rendered in two ways, to compare the results.
_TRIALS: tuple[list[Any], ...] = (
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": " <b>a</b>\n"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "\u4f60"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c "},
        {"role": "user", "name": "d", "content": "e"},
    ],
)


def chat_renderer(chat: Any) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function that makes a prompt from text messages.

    `OnlineRenderer.preprocess_chat` makes the same prompt for a request without options.
    """
    online, renderer = chat.online_renderer, chat.renderer
    media = chat.model_config.multimodal_config
    plain = ChatCompletionRequest(messages=_TRIALS[0])
    params = plain.build_chat_params(online.chat_template, online.chat_template_content_format).with_defaults(
        merge_kwargs(online.default_chat_template_kwargs, {"tools": None, "tokenize": False}),
        default_media_io_kwargs=media.media_io_kwargs if media else None,
    )

    def render(messages: list[dict[str, Any]]) -> str:
        _, prompt = renderer.render_messages(messages, params)
        text: str = prompt["prompt"]
        return text

    try:
        direct = _direct_renderer(renderer, params)
        same = all(direct(messages) == render(messages) for messages in _TRIALS)
    except Exception as error:  # The model's template may raise any exception.
        logger.debug("chats are rendered by vLLM's renderer: %s", error)
        return render
    return direct if same else render


def _direct_renderer(renderer: HfRenderer, params: Any) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function that does the work of `renderer.render_messages` in a fifth of the time.

    Work that is the same for every request is done only once, here.

    Raises:
        Exception: The model or its template needs other steps.
    """
    config, tokenizer = renderer.model_config, renderer.get_tokenizer()
    owners = [owner for owner in type(tokenizer).__mro__ if "apply_chat_template" in vars(owner)]
    if [owner for owner in owners if owner.__module__ != vllm.tokenizers.hf.__name__] != [PreTrainedTokenizerBase]:
        raise TypeError("the tokenizer has another method for chats")
    given = params.get_apply_chat_template_kwargs()
    template = resolve_chat_template(
        tokenizer, chat_template=given.pop("chat_template", None), tools=None, model_config=config
    )
    if template is None or given.pop("continue_final_message", False):
        raise ValueError("there is no template, or the template continues the last message")
    content_format = resolve_chat_template_content_format(
        chat_template=params.chat_template,
        tools=None,
        given_format=params.chat_template_content_format,
        tokenizer=tokenizer,
        model_config=config,
    )
    given = {name: value for name, value in given.items() if name not in ("tokenize", "return_dict")}
    variables = {
        **tokenizer.special_tokens_map,
        **resolve_chat_template_kwargs(tokenizer=tokenizer, chat_template=template, chat_template_kwargs=given),
    }

    def render(messages: list[dict[str, Any]]) -> str:
        conversation, *_ = parse_chat_messages(messages, config, content_format=content_format)
        (text,), _ = render_jinja_template([conversation], chat_template=template, **variables)
        return str(text)

    return render


async def of_copies(render: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Make the prompts of a batch from copies of its messages.

    For the template, vLLM replaces the arguments of tool calls with decoded arguments. It could not read the messages a
    second time after that.
    """
    request.messages = _without_iterators(request.messages)
    return await render(request.model_copy(update={"messages": deepcopy(request.messages)}))


def _without_iterators(value: Any) -> Any:
    """Replace Pydantic's iterators in a value with lists. An iterator cannot be copied, and can be read only once."""
    if isinstance(value, dict):
        return {key: _without_iterators(member) for key, member in value.items()}
    return [_without_iterators(item) for item in value] if isinstance(value, list | Iterator) else value
