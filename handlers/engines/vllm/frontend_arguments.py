"""From a model's settings to the arguments of vLLM's front end, which `handlers.openai` serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from handlers.engines.protocol import EngineStartError
from handlers.engines.vllm.arguments import FRONT_END, parse_options
from handlers.model_settings import ModelSettings

_PATHS = frozenset({"chat_template", "tool_parser_plugin"})
_LONGEST_PATH = 255
"""Bytes; anything longer is no file's name."""


def frontend_arguments(settings: ModelSettings) -> dict[str, Any]:
    """All of vLLM's front-end arguments: the model's, and vLLM's defaults for the rest.

    Raises:
        EngineStartError: an option has a value that vLLM refuses; the option is named.
    """
    given = {
        name: _in_model_dir(settings, text) if name in _PATHS else text
        for name, text in settings.engine_arguments.items()
        if name in FRONT_END
    }
    arguments = _defaults() | parse_options(FrontendArgs.add_cli_args, settings, given)
    _check_parsers(arguments, settings)
    return arguments


def _in_model_dir(settings: ModelSettings, text: str) -> str:
    """A file of the model directory, which is LMI's working directory; or the text itself, such as a template."""
    path = settings.model_dir / text
    return str(path) if len(text) < _LONGEST_PATH and "\n" not in text and path.is_file() else text


def _defaults() -> dict[str, Any]:
    parser: Any = FrontendArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    return dict(vars(parser.parse_args([])))


def _check_parsers(arguments: dict[str, Any], settings: ModelSettings) -> None:
    """As vLLM's own server does before it starts. Source: vllm.entrypoints.launchers.launcher."""
    engine = {name: text.strip() for name, text in settings.engine_arguments.items()}
    _import("tool_parser_plugin", arguments["tool_parser_plugin"], ToolParserManager.import_tool_parser)
    _import(
        "reasoning_parser_plugin",
        engine.get("reasoning_parser_plugin"),
        ReasoningParserManager.import_reasoning_parser,
    )
    parser = arguments["tool_call_parser"]
    if arguments["enable_auto_tool_choice"] and parser is None:
        raise EngineStartError("option.enable_auto_tool_choice needs option.tool_call_parser")
    _check_known("tool_call_parser", parser, ToolParserManager.list_registered())
    _check_known("reasoning_parser", engine.get("reasoning_parser"), ReasoningParserManager.list_registered())


def _import(name: str, plugin: str | None, load: Callable[[str], None]) -> None:
    if not plugin:
        return
    try:
        load(plugin)
    except Exception as error:
        raise EngineStartError(f"option.{name}: {plugin} cannot be imported: {error}") from None


def _check_known(name: str, value: str | None, known: list[str]) -> None:
    if value and value not in known:
        raise EngineStartError(f"option.{name}: vLLM has no parser {value!r}; allowed: {', '.join(sorted(known))}")
