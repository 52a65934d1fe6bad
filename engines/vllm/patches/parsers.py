"""Patches of how vLLM chooses parsers of tool calls, and makes the schema of required calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_parsers(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the server choose how tools are called for each model; vLLM chooses when the class of a parser is made.

    Args:
        wrap: Takes the function that finds the class of a model's parser, and returns the one that takes its place.
    """
    from vllm.parser.parser_manager import ParserManager
    from vllm.tool_parsers import ToolParser

    ToolParser.__init_subclass__ = object.__init_subclass__
    ParserManager.get_parser = staticmethod(wrap(ParserManager.get_parser))


def patch_call_schemas(finish: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have the server finish the JSON schema of required calls.

    vLLM would merge the `$defs` of the tools, and refuse tools with different ones of the same name.

    Args:
        finish: Takes vLLM's schema, in which each tool's schema stands as it came, and returns the one that takes its
            place.
    """
    from vllm.tool_parsers import utils

    schema_of_calls = utils._get_json_schema_from_tools
    utils._get_tool_schema_defs = lambda _: {}
    utils._get_json_schema_from_tools = lambda *arguments: finish(schema_of_calls(*arguments))
