"""SageMaker's secure mode: restricts which parts of an untrusted model are allowed.

A check returns one line for each part of the model that it refuses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from container.settings.options import LMI_DIST, TENSORRT_LLM
from container.settings.values import Value, is_true, quoted
from container.sources.location import is_hub_id

_PLAIN = (
    "engine job_queue_size max_idle_time batch_size max_batch_delay max_dynamic_batch_size minWorkers maxWorkers "
    "load_on_devices"
)
_GENERAL = (
    "mpi_mode entryPoint pythonExecutable task model_id revision dtype trust_remote_code batch_size rolling_batch "
    "max_rolling_batch_size tensor_parallel_degree pipeline_parallel_degree parallel_loading "
    "model_loading_timeout output_formatter tgi_compat enable_streaming low_cpu_mem_usage"
)
_VLLM = (
    "max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager gpu_memory_utilization quantize "
    "enable_lora max_loras max_lora_rank max_cpu_loras lora_extra_vocab_size enable_chunked_prefill "
    "enable_prefix_caching cpu_offload_gb_per_gpu disable_sliding_window speculative_draft_model speculative_length "
    "draft_model_tp_size"
)
_NEURON = (
    "n_positions load_in_8bit unroll context_length_estimate load_split_model compiled_graph_path "
    "group_query_attention enable_mixed_precision_accumulation enable_saturate_infinity"
)
_TENSORRT_LLM = f"max_input_len max_output_len max_num_tokens kv_cache_free_gpu_mem_fraction {TENSORRT_LLM}"

# The allowed keys. All other keys are refused. The keys are case-sensitive.
ALLOWED_KEYS = frozenset(_PLAIN.split()) | frozenset(
    f"option.{name}" for group in (_GENERAL, _VLLM, LMI_DIST, _NEURON, _TENSORRT_LLM) for name in group.split()
)

MODE, CONTROLS, CHANNELS = "SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
REQUIREMENTS = "DISALLOW_REQUIREMENTS_TXT"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
PICKLES = "DISALLOW_PICKLE_FILES"
CHAT_TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
KNOWN_CONTROLS = frozenset({SCRIPTS, REQUIREMENTS, REMOTE_CODE, PICKLES, CHAT_TEMPLATE})

_PYTHON = ("/opt/djl/vllm_venv/bin/python", "/usr/bin/python3")
_OURS = "djl_python."
# Suffixes of pickled files, and of index files. An index file lists pickled files, which may have any name.
_PICKLE_NAMES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".cloudpkl", ".joblib"),
    *(".bin.index.json", ".pt.index.json"),
)
_TEMPLATE = "chat_template"
_TEMPLATE_SUFFIX, _TEMPLATE_JSON = ".jinja", "chat_template.json"
# Suffixes of files whose fields transformers passes to a tokenizer or a processor.
_CONFIGURATIONS = ("config.json", "special_tokens_map.json")
_HUB_KEYS = ("option.model_id", "option.speculative_draft_model")  # The allowed keys that may name a hub model.


@dataclass(frozen=True, slots=True)
class SecureMode:
    """The active controls, and the model that they check."""

    controls: frozenset[str]
    channels: tuple[Path, ...] = ()  # The untrusted directories. If none is given, all of `directories` are untrusted.
    # The model's settings as they were written in serving.properties, the environment and the management API.
    keys: Mapping[str, Value] = field(default_factory=dict)
    variables: Mapping[str, Value] = field(default_factory=dict)
    directories: tuple[Path, ...] = ()  # The model directory, and the directory of the weights if it is separate.
    fetched: tuple[Path, ...] = ()  # The directories of models that were fetched from S3. They are always untrusted.
    handler: Path | None = None  # The file of the model's handler. None if an engine or a module serves the model.

    def model_faults(self) -> list[str]:
        found = [
            f"{key} ({value.source}) is not allowed in the secure mode"
            for key, value in self.keys.items()
            if key not in ALLOWED_KEYS
        ]
        found += self._interpreter()
        if SCRIPTS in self.controls:
            found += self._entry_point()
            found += _model_code(self.directories, self.handler)
        if REQUIREMENTS in self.controls:
            found += _requirements(self.directories, self.handler)
        remote_code = self.keys.get("option.trust_remote_code")
        if REMOTE_CODE in self.controls and remote_code is not None and is_true(remote_code):
            found.append(f"{REMOTE_CODE}: {remote_code.describe('option.trust_remote_code')}")
        if of_files := sorted({PICKLES, CHAT_TEMPLATE} & self.controls):
            for key in _HUB_KEYS:
                found += self._hub_model(key, of_files)
        channels = tuple(dict.fromkeys((*(self.channels or self.directories), *self.fetched)))
        if PICKLES in self.controls:
            found += _pickles(channels)
        if CHAT_TEMPLATE in self.controls:
            found += _chat_templates(channels)
        return found

    def _hub_model(self, key: str, controls: Iterable[str]) -> Iterator[str]:
        """Refuse a model that `serving.properties` names by a hub id.

        The controls cannot check the files of a hub model.
        """
        named = self.keys.get(key)
        if named is None or not named.source.startswith("serving.properties") or not is_hub_id(named.text):
            return
        if not any((directory / named.text).is_dir() for directory in (*self.directories, Path())):
            given = named.describe(key)
            yield f"{', '.join(controls)}: {given}: a hub's files cannot be checked before they load"

    def adapter_faults(self, directory: Path) -> list[str]:
        """Return one line for each refused part of an adapter's directory.

        A path that is not a directory is refused, because it cannot be checked.
        """
        if not directory.is_dir():
            return [f"`src` must be a directory in the secure mode; there is none at {directory}"]
        checks: dict[str, Callable[[Iterable[Path]], Iterator[str]]] = {
            SCRIPTS: _model_code,
            REQUIREMENTS: _requirements,
            PICKLES: _pickles,
        }
        return [fault for control, check in checks.items() if control in self.controls for fault in check((directory,))]

    def _interpreter(self) -> Iterator[str]:
        given = self.keys.get("option.pythonExecutable") or self.variables.get("PYTHON_EXECUTABLE")
        for value in (given, self.keys.get("option.python_executable")):
            if value is not None and value.text.strip() not in _PYTHON:
                yield (
                    f"the interpreter is {quoted('', value.text)} ({value.source}); "
                    f"allowed in the secure mode: {', '.join(_PYTHON)}"
                )

    def _entry_point(self) -> Iterator[str]:
        value = self.keys.get("option.entryPoint") or self.variables.get("DJL_ENTRY_POINT")
        if value is not None and not value.text.strip().startswith(_OURS):
            yield f"{SCRIPTS}: the entry point is {quoted('', value.text)} ({value.source}); allowed: {_OURS}<module>"


def read_secure_mode(variables: Mapping[str, Value], problems: list[str]) -> SecureMode | None:
    """Return the secure mode that the environment asks for. None if it is off. Add invalid values to `problems`."""
    mode = variables.get(MODE)
    if mode is None or mode.word != "true":
        return None
    controls = frozenset(_listed(variables, CONTROLS))
    if not controls:
        problems.append(f"{MODE} is true, but {CONTROLS} is not set; allowed: {', '.join(sorted(KNOWN_CONTROLS))}")
    for name in sorted(controls - KNOWN_CONTROLS):
        # The start has to fail. Otherwise the unknown control would seem to be active.
        problems.append(f"{CONTROLS} has {quoted('', name)}; allowed: {', '.join(sorted(KNOWN_CONTROLS))}")
    channels = tuple(Path(text) for text in _listed(variables, CHANNELS))
    for channel in channels:
        if not channel.is_dir():
            problems.append(f"{CHANNELS} has {quoted('', str(channel))}: there is no such directory")
    return SecureMode(controls, channels)


def _listed(variables: Mapping[str, Value], name: str) -> list[str]:
    value = variables.get(name)
    return [part.strip() for part in value.text.split(",") if part.strip()] if value is not None else []


def _model_code(directories: Iterable[Path], handler: Path | None = None) -> Iterator[str]:
    """Refuse Python files that may be run.

    A `model.py` is refused even if it is not the entry point, because its formatters may run, too.
    """
    found = [directory / name for directory in directories for name in ("model.py", f"{directory.name}.py")]
    for path in dict.fromkeys((*found, *([handler] if handler is not None else []))):
        if os.path.lexists(path):
            yield f"{SCRIPTS}: there is a {path.name}"


def _requirements(directories: Iterable[Path], handler: Path | None = None) -> Iterator[str]:
    for directory in dict.fromkeys((*directories, *([handler.parent] if handler is not None else []))):
        if os.path.lexists(directory / "requirements.txt"):
            yield f"{REQUIREMENTS}: there is a requirements.txt"


def _pickles(channels: Iterable[Path]) -> Iterator[str]:
    for channel, path in _files(channels):
        # Both names are checked, because the name of a link may differ from the name of the file that is read.
        if any(name.lower().endswith(_PICKLE_NAMES) for name in (path.name, os.path.realpath(path))):
            yield f"{PICKLES}: there is {path.relative_to(channel)} ({', '.join(_PICKLE_NAMES)} are not allowed)"


def _chat_templates(channels: Iterable[Path]) -> Iterator[str]:
    """Refuse files that are chat templates, and JSON files that have the key `chat_template` at any depth.

    transformers passes all fields of `tokenizer_config.json` and `special_tokens_map.json` to a tokenizer, and all
    fields of `processor_config.json` to a processor. vLLM prefers the processor's template to the tokenizer's.
    """
    for channel, path in _files(channels):
        if path.name.endswith(_TEMPLATE_SUFFIX) or path.name == _TEMPLATE_JSON:
            yield f"{CHAT_TEMPLATE}: there is {path.relative_to(channel)}"
        elif path.name.endswith(_CONFIGURATIONS) and (fault := _template_in(path)):
            yield f"{CHAT_TEMPLATE}: {path.relative_to(channel)} {fault}"


def _template_in(path: Path) -> str:
    try:
        level = [json.loads(path.read_bytes())]
    except (OSError, ValueError, RecursionError):
        return "cannot be read"
    while level:
        objects = [item for item in level if isinstance(item, dict)]
        if any(item.get(_TEMPLATE) is not None for item in objects):
            return f"has a {_TEMPLATE}"
        lists = [item for item in level if isinstance(item, list)]
        level = [inner for item in objects for inner in item.values()] + [inner for item in lists for inner in item]
    return ""


def _files(channels: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield each file below the channels, with its channel. Links are followed, and each directory is read once."""
    seen: set[str] = set()
    for channel in channels:
        for folder, subfolders, names in os.walk(channel, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            yield from ((channel, Path(folder, name)) for name in names)
