"""Patches vLLM's choice of tool-call parsers, and vLLM's schema of required calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_parsers(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the server choose for each model how tools are called.

    vLLM chooses when a parser's class is created. So all models with this parser would share the choice.

    Args:
        wrap: Takes the function that finds the class of a model's parser, and returns its replacement.
    """
    from vllm.parser.parser_manager import ParserManager
    from vllm.tool_parsers import ToolParser

    ToolParser.__init_subclass__ = object.__init_subclass__
    ParserManager.get_parser = staticmethod(wrap(ParserManager.get_parser))


def patch_call_schemas(finish: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let the server complete the JSON schema of required calls.

    vLLM would merge the `$defs` of all tools, and refuse tools that have different definitions of the same name.

    Args:
        finish: Replaces the schema of the calls. It takes vLLM's schema, in which the schema of each tool is unchanged,
            and returns the new schema.
    """
    from vllm.tool_parsers import utils

    schema_of_calls = utils._get_json_schema_from_tools
    utils._get_tool_schema_defs = lambda _: {}
    utils._get_json_schema_from_tools = lambda *arguments: finish(schema_of_calls(*arguments))
