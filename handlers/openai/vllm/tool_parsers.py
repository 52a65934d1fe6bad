"""Chooses vLLM's parser for an answer, depending on the tools of the call.

`OnlineRenderer.parser` is the class whose `adjust_request` constrains tool calls. The objects that serve responses have
this class as `parser`, and the objects that serve chats and messages have it as `parser_cls`. They read the attribute
for each call. None means no parser. tests/live/test_openai_internals.py checks these internals.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.parser_manager import ParserManager

from handlers.openai.current_call import current_call

logger = logging.getLogger(__name__)


def without_calls(args: argparse.Namespace, client: Any) -> Any:
    """Return the class of the model's parser without the tool-call parser, or None if the model has no other parser.

    If the tool-call parser needs a token or a package that is missing, it is also removed from `args`.
    """
    config, tokenizer = client.model_config, client.renderer.tokenizer
    get = partial(
        ParserManager.get_parser,
        reasoning_parser_name=args.structured_outputs_config.reasoning_parser,
        model_name=config.model,
        is_harmony=config.hf_config.model_type == "gpt_oss",
        tool_strict_level=args.tool_strict_level,
        tokenizer=tokenizer,
    )
    try:
        get(tool_parser_name=args.tool_call_parser, enable_auto_tools=args.enable_auto_tool_choice)
    except TypeError as error:
        logger.warning("tool_call_parser=%s is left out: %s: %s", args.tool_call_parser, error, error.__cause__)
        args.tool_call_parser, args.enable_auto_tool_choice = None, False
    return get()


def parse_only_tools(state: Any, plain: Any) -> None:
    """Answer calls without tools as if the model had no tool-call parser.

    With a tool-call parser, vLLM sends no chunk for a token without text, and some parsers show special tokens.

    Args:
        state: The application's state.
        plain: The class of the parser for calls without tools. None means no parser.
    """
    online = state.online_renderer
    _choose_by_call(online, "parser", None if plain is None else hiding_constraints(plain))
    _choose_by_call(state.openai_serving_responses, "parser", plain)
    for name in ("openai_serving_chat", "openai_serving_chat_batch", "anthropic_serving_messages"):
        _choose_by_call(getattr(state, name), "parser_cls", plain)


def _choose_by_call(owner: Any, name: str, plain: Any) -> None:
    whole, kind = getattr(owner, name), type(owner)

    def parser(_: Any) -> Any:
        call = current_call.get(None)
        return whole if call is not None and call.uses_tools else plain

    owner.__class__ = type(kind.__name__, (kind,), {name: property(parser)})


def hiding_constraints(parser: Any) -> Any:
    """Return a parser class that constrains tool calls, and leaves the request's field `text` unchanged.

    vLLM's class puts the schema of a forced tool call into `text`, and the answer would show it: an answer repeats the
    request's `text`.
    """

    class Parser(parser):  # type: ignore[misc]
        def adjust_request(self, request: Any) -> Any:
            text = getattr(request, "text", None)
            request = super().adjust_request(request)
            if isinstance(request, ResponsesRequest) and request.text is not text:
                request.structured_outputs = request.extract_structured_outputs()
                request.text = text
            return request

    return Parser
