"""Makes the arguments of the vLLM engine and of its OpenAI front end (`handlers.openai`) from a model's settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from vllm.config import PoolerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engines.interface import EngineStartError
from engines.settings.engine_config import DEFAULT_MAX_LORAS, DEFAULT_MEDIA_COUNTS, EngineConfig
from engines.settings.parsers import FALSE, TRUE
from engines.vllm.arguments.table import FRONT_END
from engines.vllm.internals import module_of
from engines.vllm.parsers import classes as parsers

logger = logging.getLogger(__name__)

_cli_args = module_of("FrontendArgs")

_LMI_NAMES = {("quantization", "bitsandbytes8"): "bitsandbytes"}  # Values that LMI names differently from vLLM.
# The form of `limit_mm_per_prompt` in LMI v0.31: image=2,video=1.
_COUNTS = re.compile(r"\s*\w+\s*=\s*\d+\s*(,\s*\w+\s*=\s*\d+\s*)*")
_JSON_LOADS = re.compile(r"<function loads at 0x[0-9a-f]+>")
# If only some prompts of a batch have an adapter, vLLM's CPU kernels use the slot -1 for the other prompts. That is the
# last slot, and the kernels add its weights. So the last slot must stay empty (zeros). vLLM's GPU kernels skip the rows
# of such prompts. The CPU kernels of vLLM 0.33 also skip them, so this constant can then be removed.
EMPTY_SLOTS_ON_CPU = 1
_PATHS = frozenset({"chat_template", "tool_parser_plugin"})


def engine_arguments(config: EngineConfig, on_cpu: bool) -> dict[str, Any]:
    """Return keyword arguments for vLLM's `AsyncEngineArgs`. `serve_defaults` has the values of all other arguments.

    Raises:
        EngineStartError: vLLM's argument parser refuses the value of an option. The message names the option.
    """
    given = {name: text for name, text in config.engine_arguments.items() if name not in FRONT_END}
    passed = _parse(AsyncEngineArgs.add_cli_args, config, given)
    arguments: dict[str, Any] = {
        "model": config.model_id,
        "served_model_name": list(config.public_names),  # vLLM's errors show this name instead of a path.
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_degree or 1,
        "pipeline_parallel_size": config.pipeline_parallel_degree,
        "enable_log_requests": False,
    }
    if config.max_rolling_batch_size is not None:
        arguments["max_num_seqs"] = config.max_rolling_batch_size
    if on_cpu:
        # On a CPU, compilation takes minutes and gains little.
        arguments["enforce_eager"] = True
    if config.rolling_batch == "scheduler":
        arguments["model_impl"] = "transformers"
    arguments.update(passed)
    arguments["limit_mm_per_prompt"] = DEFAULT_MEDIA_COUNTS | passed.get("limit_mm_per_prompt", {})
    if config.enable_lora:
        arguments |= _lora_arguments(passed, on_cpu)
    if config.task in ("embed", "classify"):
        # These tasks turn a model that generates text into a pooling model. They do not change a pooling model.
        arguments = {"runner": "pooling", "convert": config.task, **arguments}
    if config.pooling is not None:
        arguments.setdefault("pooler_config", PoolerConfig(seq_pooling_type=config.pooling))
    return arguments


def serve_defaults() -> dict[str, Any]:
    """Return the defaults of `vllm serve` for all engine arguments. `AsyncEngineArgs` has other defaults."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return {name: value for name, value in vars(parser.parse_args([])).items() if name in known}


def _lora_arguments(passed: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for LoRA.

    On a CPU, each adapter in memory has a slot, and one more slot stays empty.

    On a GPU, vLLM reserves the memory of `max_loras` slots, and further adapters wait in main memory. The GPU kernels
    skip the rows of prompts without an adapter, so they need no empty slot.
    """
    arguments = {"enable_lora": True, "max_loras": passed.get("max_loras", DEFAULT_MAX_LORAS)}
    if on_cpu:
        slots = max(arguments["max_loras"], passed.get("max_cpu_loras") or 0) + EMPTY_SLOTS_ON_CPU
        arguments |= {"max_loras": slots, "max_cpu_loras": slots}
    return arguments


def frontend_arguments(config: EngineConfig) -> dict[str, Any]:
    """Return all arguments of vLLM's front end: the model's options, and vLLM's defaults.

    Raises:
        EngineStartError: vLLM refuses the value of an option. The message names the option.
    """
    given = {
        name: _in_model_dir(config, text) if name in _PATHS else text
        for name, text in config.engine_arguments.items()
        if name in FRONT_END
    }
    defaults = vars(_cli_args.FrontendArgs.add_cli_args(FlexibleArgumentParser(add_help=False)).parse_args([]))
    arguments: dict[str, Any] = defaults | _parse(_cli_args.FrontendArgs.add_cli_args, config, given)
    _check_parsers(arguments, config)
    if (check := getattr(_cli_args, "validate_reasoning_effort_map", None)) is not None:  # Only in vLLM 0.33.
        try:
            check(arguments["reasoning_effort_map"])
        except ValueError as error:
            raise EngineStartError(f"option.reasoning_effort_map: {error}") from None
    return arguments


def _in_model_dir(config: EngineConfig, text: str) -> str:
    """Return the path of a file in the model directory. If the file does not exist, return the text itself.

    In LMI, a relative path is below the model directory too, because that is LMI's working directory.
    """
    path = os.path.join(config.model_dir, text)
    return path if os.path.isfile(path) else text


def _check_parsers(arguments: Mapping[str, Any], config: EngineConfig) -> None:
    """Check the names of parsers, as vLLM's own server does (`vllm.entrypoints.launchers.launcher`)."""
    given: dict[str, Any] = {name: text.strip() for name, text in config.engine_arguments.items()}
    given.update(arguments)
    for name, load in (
        ("tool_parser_plugin", parsers.import_plugin),
        ("reasoning_parser_plugin", ReasoningParserManager.import_reasoning_parser),
    ):
        if plugin := given.get(name):
            try:
                load(plugin)
            except Exception as error:
                raise EngineStartError(f"option.{name}: {plugin} cannot be imported: {error}") from None
    if given["enable_auto_tool_choice"] and given["tool_call_parser"] is None:
        raise EngineStartError("option.enable_auto_tool_choice needs option.tool_call_parser")
    for name, manager in (("tool_call_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        value, known = given.get(name), manager.list_registered()
        if value and value not in known:
            allowed = ", ".join(sorted(known))
            raise EngineStartError(f"option.{name}: vLLM has no parser {value!r}; allowed: {allowed}")


def _parse(add_arguments: Callable[[Any], Any], config: EngineConfig, given: Mapping[str, str]) -> dict[str, Any]:
    """Parse options with vLLM's argument parser.

    Args:
        add_arguments: Adds vLLM's arguments to a parser.
        config: The settings of the model.
        given: The options.

    Raises:
        EngineStartError: The parser refuses the value of an option. The message names the option.
    """
    parser = add_arguments(_Parser(add_help=False, argument_default=argparse.SUPPRESS))
    actions = {action.dest: action for action in parser._actions}
    for action in actions.values():
        action.default = argparse.SUPPRESS
    parsed: dict[str, Any] = {}
    for name, text in given.items():
        source = config.engine_argument_sources.get(name, f"option.{name}")
        if name in actions:
            parsed |= _parse_one(parser, actions[name], text.strip(), source)
        else:
            logger.warning("%s: option.%s is none of LMI's and not of vLLM's engine; it has no effect", source, name)
    return parsed


class _Parser(FlexibleArgumentParser):
    """Raises an error for wrong arguments. argparse itself would exit the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parse_one(parser: Any, action: Any, text: str, source: str) -> dict[str, Any]:
    flag = next(option for option in action.option_strings if option.startswith("--"))
    text = _as_vllm_writes(action.dest, text)
    try:
        if action.nargs == 0:
            arguments = _switch(flag, text, action)
        elif action.nargs in ("+", "*"):
            arguments = [flag, *_words(text)]
        else:
            arguments = [f"{flag}={text}"]
        return dict(vars(parser.parse_args(arguments)))
    except (ValueError, TypeError, ArithmeticError, RecursionError, argparse.ArgumentTypeError) as error:
        reason = _JSON_LOADS.sub("JSON", str(error))
        raise EngineStartError(
            f"{source}: {text!r} is not a value that vLLM takes for {action.dest}: {reason}"
        ) from None


def _as_vllm_writes(name: str, text: str) -> str:
    if name == "limit_mm_per_prompt" and _COUNTS.fullmatch(text):
        pairs = (pair.split("=") for pair in text.split(","))
        return json.dumps({kind.strip(): int(count) for kind, count in pairs})
    return _LMI_NAMES.get((name, text.lower()), text)


def _switch(flag: str, text: str, action: Any) -> list[str]:
    """Return a flag or its negation. If the value is false and the flag has no negation, return nothing."""
    value = text.lower()
    if value in TRUE or not value:
        return [flag]
    if value in FALSE:
        return [option for option in action.option_strings if option.startswith("--no-")][:1]
    raise ValueError("expected true or false")


def _words(text: str) -> list[str]:
    if text.startswith("["):
        return [str(item) for item in json.loads(text)]
    return text.replace(",", " ").split()
