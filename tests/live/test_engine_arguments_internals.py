"""Engine arguments, with vLLM but without an engine: the defaults of `vllm serve`, and GPUs that share each layer."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from engines.daemon_thread import LastingThreads
from engines.interface import EngineStartError
from engines.memory.parallelism import ModelMemory, Weights, tensor_parallel_sizes
from engines.settings.engine_config import DEFAULT_MEDIA_COUNTS
from engines.vllm.arguments.table import ARGUMENTS, FRONT_END, KINDS, ROWS, TABLE, WITHOUT_EFFECT
from handlers.model_config import ModelConfig
from tests.engine_arguments import REFUSED, TRIALS, Trial, command_line, files
from tests.live.server import write_model
from tests.live.small_pooling_models import prepare_small_encoder
from tests.settings import load_settings

ROOT = Path(__file__).parents[2]
TABLE_FILE = ROOT / "engines" / "vllm" / "arguments" / "table.json"
MODELS: dict[str, Any] = json.loads((ROOT / "tests" / "fixtures" / "model_configs.json").read_bytes())
WITH_LORA = {
    name
    for name, trial in TRIALS.items()
    if isinstance(trial, Trial) and name != "max_loras" and (name == "enable_lora" or "enable_lora" in trial.beside)
}
ALWAYS = {"limit_mm_per_prompt", "served_model_name"}
"""Arguments whose default differs from `vllm serve`'s."""
ON_CPU = ALWAYS | {"enforce_eager"}
ADAPTERS = {"max_loras": "2", "max_cpu_loras": "8"}
IMAGES = DEFAULT_MEDIA_COUNTS | {"image": 2, "video": 1}
GIB = 1 << 30


@pytest.fixture
def config(sample_model: Path) -> ModelConfig:
    return ModelConfig(name="model", model_dir=sample_model, model_id=str(sample_model))


class _StoppedHere(Exception):
    """This exception ends the load of a model once vLLM's arguments are known. The tests need no engine."""


def arguments_seen(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Start loading a model. Return the arguments and the usage context that vLLM gets."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.loading import VllmLoader

    seen = []

    def create(self: Any, usage_context: Any = None, headless: bool = False) -> NoReturn:
        seen.append((self, usage_context))
        raise _StoppedHere

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", create)
    thread = LastingThreads("engine")
    try:
        with pytest.raises(EngineStartError):
            asyncio.run(VllmLoader(config, thread).load())
    finally:
        thread.end()
    (found,) = seen
    return found


def serve_arguments(model: Path) -> Any:
    """The arguments that vLLM itself makes for `vllm serve MODEL`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(model)])
    return AsyncEngineArgs.from_cli_args(parsed)


def documented_differences() -> set[str]:
    """The arguments in the first column of the table in docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    _, _, text = text.partition("<!-- differences from vllm serve -->")
    table, _, _ = text.partition("<!-- end of differences -->")
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {name.strip(" `") for row in rows for name in row.split(",")}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, set()),
        ({"enable_lora": True}, {"max_loras", "max_cpu_loras", "enable_lora"}),
        ({"rolling_batch": "scheduler"}, {"model_impl"}),
    ],
    ids=["default", "adapters", "scheduler"],
)
def test_the_documentation_has_what_differs_from_vllm_serve(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], expected: set[str]
) -> None:
    ours, context = arguments_seen(replace(config, **more), monkeypatch)
    assert context.value == "OPENAI_API_SERVER", "batches are as large as those of `vllm serve`"
    served = serve_arguments(config.model_dir)
    names = [field.name for field in dataclasses.fields(served)]
    differing = {name for name in names if getattr(ours, name) != getattr(served, name)}
    assert differing == ON_CPU | expected
    assert differing - set(more) <= documented_differences()


def test_the_documentation_has_what_is_changed_in_vllms_configuration(config: ModelConfig) -> None:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.arguments.from_settings import engine_arguments, serve_defaults
    from engines.vllm.constraints.translator import choose_backend
    from engines.vllm.sampling import load_typical

    def made() -> VllmConfig:
        arguments = engine_arguments(config, on_cpu=True) | {"max_model_len": 64}
        return AsyncEngineArgs(**serve_defaults() | arguments).create_engine_config()

    before, changed = made(), made()
    choose_backend(changed, "")
    load_typical(changed)
    names = vars(before).keys() - {"instance_id"}  # random
    differing = {name for name in names if str(getattr(before, name)) != str(getattr(changed, name))}
    assert differing == {"structured_outputs_config", "model_config"}
    assert before.model_config.logits_processors != changed.model_config.logits_processors
    assert {"structured_outputs_config", "logits_processors"} <= documented_differences()


@pytest.mark.parametrize(
    ("arguments", "most", "memory", "size", "reason"),
    [
        ({}, False, 22.0, 1, "the fewest that hold the weights (0.3 GiB) and a useful KV cache"),
        ({}, True, 22.0, 3, "the most that the model allows; the model allows 1, 3"),
        ({}, False, 2.0, 3, "which may be too few for the weights"),
        ({"pipeline_parallel_size": 4}, True, 22.0, 1, "(4 pipeline stages, 1 replicas,"),
        ({"data_parallel_size": 2}, True, 22.0, 3, "(1 pipeline stages, 2 replicas,"),
        ({"data_parallel_size": 8}, True, 22.0, 1, None),
        ({"max_model_len": -1}, False, 22.0, 1, "the fewest that hold"),
    ],
)
def test_gpus_that_share_each_layer_are_as_few_as_hold_the_model_or_as_many_as_it_allows(
    sample_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    most: bool,
    memory: float,
    size: int,
    reason: str | None,
) -> None:
    import vllm.platforms
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.arguments.from_settings import serve_defaults
    from engines.vllm.copies.places import share_layers

    platform = vllm.platforms.current_platform
    monkeypatch.setattr(platform, "get_device_total_memory", lambda gpu: int(memory * GIB))
    engine_args = AsyncEngineArgs(**serve_defaults() | {"model": str(sample_model)} | arguments)
    with caplog.at_level(logging.INFO):
        share_layers(engine_args, range(8), most)
    assert engine_args.tensor_parallel_size == size
    if reason is None:
        assert not caplog.messages  # each replica has one GPU
    else:
        assert reason in caplog.text


@pytest.mark.parametrize(
    ("given", "on_cpu", "expected"),
    [
        ({}, True, {"limit_mm_per_prompt": DEFAULT_MEDIA_COUNTS}),
        ({"max_rolling_batch_size": 7}, True, {"max_num_seqs": 7}),
        ({"rolling_batch": "scheduler"}, True, {"model_impl": "transformers"}),
        ({"rolling_batch": "scheduler", "engine_arguments": {"model_impl": "vllm"}}, True, {"model_impl": "vllm"}),
        # LMI's default numbers. On a CPU there is one more slot, which stays empty.
        ({"enable_lora": True}, False, {"max_loras": 4, "enable_lora": True}),
        ({"enable_lora": True}, True, {"max_loras": 5, "max_cpu_loras": 5}),
        ({"enable_lora": True, "engine_arguments": ADAPTERS}, False, {"max_loras": 2, "max_cpu_loras": 8}),
        ({"enable_lora": True, "engine_arguments": ADAPTERS}, True, {"max_loras": 9, "max_cpu_loras": 9}),
        ({"engine_arguments": {"enable_prefix_caching": "FALSE"}}, True, {"enable_prefix_caching": False}),
        # The limits in LMI's notation, and as JSON.
        *[
            ({"engine_arguments": {"limit_mm_per_prompt": text}}, True, {"limit_mm_per_prompt": IMAGES})
            for text in ("image=2,video=1", " image = 2 , video=1", '{"image": 2, "video": 1}')
        ],
    ],
)
def test_settings_become_arguments(
    config: ModelConfig, given: dict[str, Any], on_cpu: bool, expected: dict[str, Any]
) -> None:
    from engines.vllm.arguments.from_settings import engine_arguments

    found = engine_arguments(replace(config, **given), on_cpu)
    assert {name: found.get(name, False) for name in expected} == expected


def _kind(action: Any) -> str | list[str]:
    """Return the kind of an argument's value. The kind follows from the texts that vLLM's parser accepts."""
    if action.nargs == 0:
        return "boolean"
    if action.nargs in ("+", "*"):
        return "text"  # Several values.
    if action.choices:
        return [str(choice) for choice in action.choices]

    def takes(text: str) -> bool:
        try:
            (action.type or str)(text)
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            return False
        return True

    if takes("word") or takes("{}") or not takes("1"):
        return "text"
    return "number" if takes("1.5") else "size" if takes("8k") else "integer"


def test_the_table_of_arguments_has_those_of_vllm_serve_and_each_has_an_effect_or_a_reason() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    kinds = {action.dest: _kind(action) for action in make_arg_parser(FlexibleArgumentParser())._actions}
    kinds.pop("help")
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    found = dict.fromkeys(fields) | kinds
    if os.environ.get("UPDATE_TABLES"):
        rows = {name: {**TABLE.get(name, {}), "kind": found[name]} for name in sorted(found)}
        rows |= {name: {"kind": found[name], "of": "engine", **rows[name]} for name in fields}
        rows |= {name: row for name, row in ROWS.items() if name not in TABLE}
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
        TABLE_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert {name: row["kind"] for name, row in TABLE.items()} == found
    assert {kind for kind in found.values() if isinstance(kind, str)} == KINDS.keys()
    assert {name for name, row in TABLE.items() if row.get("of") == "engine"} == fields
    assert all(WITHOUT_EFFECT.get(name) for name in fields - kinds.keys())
    # These are Slipway's own settings.
    assert kinds.keys() - fields - FRONT_END - WITHOUT_EFFECT.keys() == {"api_key", "lora_modules"}
    assert not [name for name in kinds if name.startswith("no_")]  # Such a name would be read as a negation.


@pytest.mark.parametrize(
    ("name", "text"), [("api_key", "hidden"), ("no_such_thing", "1"), ("enable_auto_tool_chioce", "true")]
)
def test_an_argument_that_is_not_the_engines_is_warned_of(
    config: ModelConfig, caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    from engines.vllm.arguments.from_settings import engine_arguments

    given = {name: text, "response_role": "assistant"}
    assert not given.keys() & engine_arguments(replace(config, engine_arguments=given), on_cpu=True).keys()
    assert f"option.{name} is none of LMI's and not of vLLM's engine; it has no effect" in caplog.text
    assert "hidden" not in caplog.text
    assert "response_role" not in caplog.text, "the front end has it"


def test_the_map_of_reasoning_efforts_is_read_and_checked_as_the_next_vllm_does(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.vllm.arguments import from_settings

    def add_arguments(parser: Any) -> Any:
        parser.add_argument("--reasoning-effort-map", type=json.loads)
        return before.add_cli_args(parser)

    def check(efforts: Any) -> None:
        if efforts is not None and not isinstance(efforts, dict):
            raise ValueError("it must be a JSON object")

    before = from_settings._cli_args.FrontendArgs
    following = SimpleNamespace(add_cli_args=add_arguments)
    monkeypatch.setattr(from_settings._cli_args, "FrontendArgs", following)
    monkeypatch.setattr(from_settings._cli_args, "validate_reasoning_effort_map", check, raising=False)
    monkeypatch.setattr(from_settings, "FRONT_END", FRONT_END | {"reasoning_effort_map"})

    def arguments(**given: str) -> dict[str, Any]:
        return from_settings.frontend_arguments(replace(config, engine_arguments=given))

    assert arguments()["reasoning_effort_map"] is None
    assert arguments(reasoning_effort_map='{"xhigh": "max"}')["reasoning_effort_map"] == {"xhigh": "max"}
    with pytest.raises(EngineStartError, match=r"option\.reasoning_effort_map: it must be a JSON object"):
        arguments(reasoning_effort_map="[]")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("enable_prefix_caching", "maybe", "expected true or false"),
        ("speculative_config", "ngram", "Value ngram cannot be converted to JSON"),
    ],
)
def test_a_value_of_another_type_is_refused(config: ModelConfig, name: str, text: str, message: str) -> None:
    from engines.vllm.arguments.from_settings import engine_arguments

    with pytest.raises(EngineStartError, match=message):
        engine_arguments(replace(config, engine_arguments={name: text}), on_cpu=True)


def test_a_default_prompt_has_to_be_one_of_the_models_prompts(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.pooling import model_of

    weights = shutil.copytree(prepare_small_encoder(), tmp_path / "model")
    (weights / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: ", "passage": "p: "}}')
    model = AsyncEngineArgs(model=str(weights)).create_model_config()
    config = ModelConfig(name="m", model_dir=weights, model_id=str(weights), default_prompt_name="other")
    with pytest.raises(EngineStartError, match=r"option\.default_prompt_name is 'other'; allowed: query, passage"):
        model_of(model, ("embed",), {}, config)


def test_an_error_of_vllm_names_the_options_that_were_given_or_the_model(config: ModelConfig, tmp_path: Path) -> None:
    from engines.vllm.loading import VllmLoader

    def refusal(changed: ModelConfig) -> str:
        thread = LastingThreads("engine")
        try:
            with pytest.raises(EngineStartError) as refused:
                asyncio.run(VllmLoader(changed, thread).load())
        finally:
            thread.end()
        return str(refused.value)

    given = {"enable_sleep_mode": "true", "sleep_preserve_parameter_names": "lm_head.weight"}
    assert refusal(replace(config, engine_arguments=given)) == (
        f"vLLM cannot load {config.model_id} with option.enable_sleep_mode, option.sleep_preserve_parameter_names: "
        "Sleep mode is not supported on current platform."
    )
    nothing = tmp_path / "nothing"
    assert str(nothing) in refusal(replace(config, model_dir=nothing, model_id=str(nothing)))


def front_end(model_dir: Path = Path("."), **options: str) -> dict[str, Any]:
    from engines.vllm.arguments.from_settings import frontend_arguments

    config = ModelConfig(name="model", model_dir=model_dir, model_id="m", engine_arguments=options)
    return frontend_arguments(config)


def test_a_chat_template_is_found_in_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert front_end(tmp_path, chat_template="chat.jinja")["chat_template"] == str(tmp_path / "chat.jinja")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_auto_tool_choice": "maybe"},
            "option.enable_auto_tool_choice: 'maybe' is not a value that vLLM takes",
        ),
        ({"enable_auto_tool_choice": "true"}, "option.enable_auto_tool_choice needs option.tool_call_parser"),
        ({"tool_call_parser": "nobody"}, "option.tool_call_parser: vLLM has no parser 'nobody'; allowed: "),
        ({"reasoning_parser": "nobody"}, "option.reasoning_parser: vLLM has no parser 'nobody'; allowed: "),
        ({"chat_template_content_format": "xml"}, "option.chat_template_content_format: 'xml' is not a value"),
        ({"default_chat_template_kwargs": "{"}, "option.default_chat_template_kwargs: '{' is not a value"),
        ({"tool_parser_plugin": "/nowhere.py", "tool_call_parser": "mine"}, "option.tool_"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(EngineStartError) as caught:
        front_end(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.long
def test_sizes_are_those_that_vllm_accepts(tmp_path: Path) -> None:
    """vLLM's own checks and layers decide about every size from 1 to 8, for every model in the table."""
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps({name: model["config"] for name, model in MODELS.items()}))
    command = [sys.executable, "-m", "tests.live.accepted_sizes", str(configs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: answer["sizes"] for name, answer in found.items()} == {
        name: model["sizes"] for name, model in MODELS.items()
    }
    for name, answer in found.items():
        # vLLM's config of the model has more values than the file, and may use other names.
        assert list(tensor_parallel_sizes(answer["config"], 8)) == answer["sizes"], name
        model = MODELS[name]
        need = ModelMemory(answer["config"], Weights(model["weight_bytes"]))
        size, _ = need.fewest(answer["sizes"], int(79.1 * GIB))
        assert size <= model["default"]["80"][-1], name


def test_each_option_of_the_table_becomes_what_vllm_serve_makes_of_it(sample_model: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engines.vllm.arguments.from_settings import engine_arguments, frontend_arguments, serve_defaults

    paths, parser, defaults = files(tmp_path), make_arg_parser(FlexibleArgumentParser()), serve_defaults()
    differing: dict[str, set[str]] = {}
    for name, trial in TRIALS.items():
        if isinstance(trial, str) or name in REFUSED:
            continue
        options = trial.options(name, paths)
        model_dir = write_model(tmp_path / name, model_id=sample_model, rolling_batch="vllm", **options)
        config = load_settings(model_dir, {}).config
        ours = dataclasses.asdict(AsyncEngineArgs(**defaults | engine_arguments(config, on_cpu=False)))
        parsed = parser.parse_args(["--model", str(sample_model), *command_line(options)])
        theirs = dataclasses.asdict(AsyncEngineArgs.from_cli_args(parsed))
        front_end = frontend_arguments(config)
        ours |= {argument: front_end[argument] for argument in FRONT_END}
        theirs |= {argument: getattr(parsed, argument) for argument in FRONT_END}
        if different := {argument for argument, value in theirs.items() if ours[argument] != value} - ALWAYS:
            differing[name] = different
    tried = {name: {name, *trial.beside} for name, trial in TRIALS.items() if isinstance(trial, Trial)}
    unused = WITHOUT_EFFECT.keys() & ARGUMENTS.keys()
    expected = {name: ignored for name, options in tried.items() if (ignored := options & unused)}
    # LMI's default is 4 adapters.
    expected |= {name: {"max_loras"} for name in WITH_LORA}
    assert differing == expected
