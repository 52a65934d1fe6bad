"""Chooses the GPUs of a model, and reports which of a machine's GPUs are used by models and which stay idle."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from container.settings.settings import Settings
from engines.engine_choice import is_vllm
from engines.memory.parallelism import (
    MEMORY_SHARE,
    Layout,
    ModelMemory,
    Weights,
    chooses_gpus,
    copies_that_fit,
    tensor_parallel_sizes,
    why_one_copy,
)
from engines.memory.weight_files import draft_model, hub_file, weight_bytes, weights_of
from handlers.model_config import ModelConfig

_CONFIG = "config.json"
_GIB = 1 << 30
_HUB_SECONDS = 3.0  # The time limit of the one call that checks whether the hub answers.
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)").fullmatch
_MULTIPLES = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
_SHARE = re.compile(r"(0?\.\d+|1(\.0+)?)").fullmatch
_REPLICAS = "option.data_parallel_size"
_ALIKE = 1 << 30  # If the free memory of two GPUs differs by fewer bytes, they are treated as equally free.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """The GPUs that a model with all of its copies uses on a machine."""

    model: str
    gpus: int | None  # None if it is unknown until the model is loaded.
    why: str
    warning: str = ""  # The GPUs or copies that the settings ask for and the machine lacks.
    copies: int | None = None  # None if the model has no engine, or if the number is not known yet.
    cache_tokens: int | None = None  # Roughly how many tokens the KV cache of each copy holds. None: unknown.
    allowed: int = 0  # The number of GPUs that the model may use.
    most_copies: int | None = 1  # The most copies that a setting allows. None if no setting limits them.
    size: int = 1  # The number of GPUs that share each layer.
    sizes: Sequence[int] = ()  # The allowed values of `size` at which the model fits into the memory.
    layout: Layout = field(default_factory=Layout)
    copied_by: str = ""  # The setting that adds copies. Empty if a copy does not fit.

    @property
    def gpus_of_copy(self) -> int | None:
        return self.gpus // self.copies if self.gpus is not None and self.copies else None

    def remedies(self, idle: int) -> dict[str, int]:
        """Return the settings with which the model would also use idle GPUs. Each of them is enough on its own."""
        if self.gpus is None or not self.copies:
            return {}
        room, found = min(self.gpus + idle, self.allowed), {}
        if self.copied_by == _REPLICAS:
            replicas = room * self.layout.replicas_here // max(self.gpus, 1)
            if replicas > self.layout.replicas_here == self.layout.replicas:
                found[_REPLICAS] = replicas
        elif self.copied_by and (copies := copies_that_fit(room, self.layout.gpus(self.size), None)) > self.copies:
            found[self.copied_by] = copies
        closeness = {size: -abs(size - self.size) for size in self.sizes}
        degree = max(closeness, key=lambda size: (self._taken(size, room), closeness[size]), default=self.size)
        if self._taken(degree, room) > self.gpus:
            found["option.tensor_parallel_degree"] = degree
        return found

    def _taken(self, size: int, room: int) -> int:
        """Return the number of GPUs that the model would use if `size` GPUs shared each layer.

        The model may use at most `room` GPUs. If one copy needs more, the result is 0.
        """
        each = self.layout.gpus(size)
        return each * copies_that_fit(room, each, self.most_copies) if each <= room else 0


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The GPUs of a machine, and how many of them each model of a server uses."""

    gpus: tuple[int, ...]  # The memory of each GPU in bytes. 0: unknown.
    models: tuple[GpuUse, ...] = ()

    @property
    def idle(self) -> int | None:
        """The number of GPUs that no model uses. None if it is unknown until the models are loaded."""
        counts = [use.gpus for use in self.models if use.gpus is not None]
        return max(len(self.gpus) - sum(counts), 0) if len(counts) == len(self.models) else None

    @property
    def lines(self) -> tuple[str, ...]:
        """A description of the machine and of each model. Empty without GPUs."""
        if not self.gpus:
            return ()
        least, count = min(self.gpus), len(self.gpus)
        smallest = "" if least == max(self.gpus) else " or more"
        lines = [f"GPUs: {count}" + (f" of {least / _GIB:.1f} GiB{smallest}" if least else "")]
        for use in self.models:
            taken = "not known yet" if use.gpus is None else f"{use.gpus} of {count}"
            lines.append(f"GPUs of model {use.model}: {taken}: {_copies(use)}{use.why}")
        return tuple(lines)

    @property
    def warning(self) -> str:
        """The GPUs and copies that the machine lacks, the idle GPUs, and the remedy. Empty if all is well."""
        warnings = [f"model {use.model}: {use.warning}" for use in self.models if use.warning]
        return "; ".join([*warnings, *([self._of_idle] if self._of_idle else [])])

    @property
    def _of_idle(self) -> str:
        count = len(self.gpus)
        if not self.idle or not self.models:
            return ""
        remedies = [
            f"{setting}={number}" + (f" of model {use.model}" if len(self.models) > 1 else "")
            for use in self.models
            for setting, number in use.remedies(self.idle).items()
        ]
        return f"{self.idle} of {count} GPUs stay idle" + (f"; to use them: {' or '.join(remedies)}" * bool(remedies))


def _copies(use: GpuUse) -> str:
    """Describe the copies of a model. The text ends with a colon: the caller appends the reason for their number."""
    if use.copies is None or not use.gpus_of_copy:
        return ""
    copies = f"{use.copies} copies" if use.copies > 1 else "1 copy"
    each = " each" if use.copies > 1 else ""
    tokens = f", about {use.cache_tokens:,} tokens of KV cache{each}" if use.cache_tokens else ""
    return f"{copies} with {use.gpus_of_copy} GPU{'s' * (use.gpus_of_copy > 1)}{each}{tokens}: "


@contextmanager
def hub_asked_once(models: Sequence[Settings]) -> Iterator[str]:
    """Check once whether the hub answers, for a command that plans a start.

    Yield a note if the hub does not answer, else "". If the hub does not answer, the code in the `with` block uses only
    cached files, because the hub's library would retry for half a minute for each model.
    """
    named = (
        model
        for settings in models
        for model in (settings.config.model_id, draft_model(settings.config.engine_arguments.get("speculative_config")))
    )
    on_hub = ", ".join(model for model in named if model and not os.path.isdir(model))
    if not on_hub:
        yield ""
        return
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        yield ""
        return
    fault = ""
    try:
        status = get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS).status_code
        fault = f"status {status}" if status >= 500 else ""
    except Exception as error:  # Any error of the HTTP client, for example because HF_ENDPOINT is malformed.
        fault = str(error) or type(error).__name__
    constants.HF_HUB_OFFLINE = bool(fault)
    try:
        yield fault and f"{constants.ENDPOINT} does not answer ({fault}): only cached files of {on_hub} are known"
    finally:
        constants.HF_HUB_OFFLINE = False


def gpu_plan(models: Sequence[Settings], gpus: Sequence[int]) -> GpuPlan:
    """Return which GPUs the models of a server use. A model without local files is looked up on the hub.

    Args:
        models: The models that the server starts with.
        gpus: The memory of each GPU in bytes. 0: unknown.
    """
    return GpuPlan(tuple(gpus), tuple(_gpu_use(settings, gpus) for settings in models) if gpus else ())


def _gpu_use(settings: Settings, gpus: Sequence[int]) -> GpuUse:
    config = settings.config
    devices = gpus_of(config, (*gpus, 0))
    if not devices:
        return GpuUse(model=config.name, gpus=0, why="load_on_devices is cpu")
    if config.handler is not None:
        return GpuUse(model=config.name, gpus=len(devices), why="those of the custom handler's workers")
    if not is_vllm(config):
        (size,), _ = sharing_gpus(config, len(devices))
        why = "dynamic batch takes one GPU, and all with option.device_map"
        return GpuUse(model=config.name, gpus=size, copies=1, why=why)
    if chooses_gpus(config.engine_arguments):
        return GpuUse(model=config.name, gpus=None, why="option.device_ids, Ray or several machines choose them")
    try:
        return _vllm_use(settings, [gpus[device] for device in devices])
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # config.json may contain anything.
        return GpuUse(model=config.name, gpus=None, why=f"a number of its config.json is not understood: {error}")


def _vllm_use(settings: Settings, gpus: Sequence[int]) -> GpuUse:
    """Read the model's files, and return the GPUs that the engine will use."""
    config, smallest = settings.config, min(gpus)
    layout, given = _layout(config), config.tensor_parallel_degree
    memory = model_memory(settings) or ModelMemory({}, Weights(0), layout)
    most = layout.most(len(gpus))
    sizes = tensor_parallel_sizes(memory.config, most)
    if given is not None:
        size, why = given, f"option.tensor_parallel_degree={given}"
    elif most > 1 and not replace(memory, max_model_len=memory.max_model_len or None).sequence_bytes(1):
        return GpuUse(model=config.name, gpus=None, why="there is no config.json that has all numbers of the model")
    elif config.tensor_parallel_max:
        size, why = sizes[-1], "option.tensor_parallel_degree=max, the most that the model allows"
    elif not smallest and len(sizes) > 1:
        return GpuUse(model=config.name, gpus=None, why="their memory decides, which is not known (--gpus 4x24GiB)")
    else:
        size, why = memory.fewest(sizes, smallest)
    is_known = bool(memory.weights.total and smallest)
    holding = [one for one in sizes if not is_known or memory.cache_bytes(one, smallest) > 0]
    useful = [one for one in holding if not is_known or memory.fits(one, smallest)]
    if is_known and not memory.fits(size, smallest) and (given is not None or config.tensor_parallel_max):
        why += f"; too few for the weights ({memory.weights.total / _GIB:.1f} GiB) and a useful KV cache"
        why += f", for which {useful[0]} are enough" if useful else ""
    for count, name in ((layout.stages, "pipeline stages"), (layout.replicas, "replicas"), (layout.nodes, "machines")):
        why += f"; {count} {name}" if count > 1 else ""
    argument = why_one_copy(config.engine_arguments)
    each = layout.gpus(size)
    fitting, copies = (copies_that_fit(len(gpus), each, limit) for limit in (None, config.max_copies))
    if argument and fitting > 1:
        why += f"; one copy, because of option.{argument}"
    elif copies > 1 or fitting > 1:
        why += "; as many copies as fit" if copies == fitting else f"; {fitting} copies fit, and maxWorkers is {copies}"
    tokens = memory.cache_tokens(size, smallest)
    return GpuUse(
        model=config.name,
        gpus=each * copies,
        why=why,
        warning=_missing(config, each, len(gpus), fitting),
        copies=copies,
        cache_tokens=None if tokens is None else int(float(f"{tokens * layout.replicas_here:.3g}")),
        allowed=len(gpus),
        most_copies=config.max_copies,
        size=size,
        sizes=(useful or holding) if memory.config else (),
        layout=layout,
        copied_by="" if is_known and size not in holding else _REPLICAS if argument else "maxWorkers",
    )


def _missing(config: ModelConfig, each: int, gpus: int, fitting: int) -> str:
    """Return the GPUs or copies that the settings ask for and the machine lacks. Empty if it has all of them."""
    if each > gpus:
        return f"it needs {each} GPUs, and has {gpus}"
    asked = config.min_copies or 1, config.max_copies or 1
    for name, number in zip(("minWorkers", "maxWorkers"), asked, strict=True):
        if number > fitting:
            return f"{name} asks for {number} copies, and {fitting} fit"
    return ""


def model_memory(settings: Settings) -> ModelMemory | None:
    """Return the memory that a model needs on vLLM, judged by its files. None without a config.json."""
    config = settings.config
    is_here = os.path.isdir(config.model_id)
    path = Path(config.model_id, _CONFIG) if is_here else hub_file(config.model_id, _CONFIG, config.revision)
    try:
        hf_config = None if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # The error is reported when the model is loaded.
    if path is None or not isinstance(hf_config, dict):
        return None
    arguments, layout = config.engine_arguments, _layout(config)
    files = str(path.parent) if is_here or weight_bytes(path.parent) else config.model_id
    weights = weights_of(files, config.revision, arguments.get("speculative_config"), layout)
    if not weights.total:  # If the weights are still on S3, the sizes in S3's listing count.
        weights = replace(weights, total=sum(remote.total_bytes for remote in settings.remote_models))
    share = arguments.get("gpu_memory_utilization", "").strip()
    cache = integer(arguments.get("kv_cache_memory_bytes", ""))
    is_fp8 = "fp8" in arguments.get("kv_cache_dtype", "")
    return ModelMemory(
        hf_config,
        weights,
        layout,
        memory_share=float(share) if _SHARE(share) else MEMORY_SHARE,
        max_model_len=_length(arguments.get("max_model_len", "").strip()),
        cache_element_bytes=1 if is_fp8 else 4 if config.dtype == "float32" else 2,
        given_cache_bytes=cache or None,
    )


def _length(text: str) -> int | None:
    """Parse vLLM's `max_model_len`, such as 8192, 8k or 8K. 0 for `auto` and -1: vLLM derives it from the memory."""
    if text.lower() in ("-1", "auto"):
        return 0
    found = _LENGTH(text)
    return int(float(found[1]) * _MULTIPLES[found[2]]) if found else None  # None: the model's own length counts.


def placed(config: ModelConfig, memory: Sequence[int]) -> ModelConfig:
    """Return the settings with `devices` in the order of use: the GPU with the most free memory first.

    The settings are unchanged for a custom handler, whose workers already have devices. They are also unchanged for an
    engine that chooses its own GPUs, such as one on Ray.
    """
    gpus = gpus_of(config, memory)
    if config.handler is not None or not gpus or chooses_gpus(config.engine_arguments):
        return config
    return replace(config, devices=gpus)


def gpus_of(config: ModelConfig, memory: Sequence[int]) -> tuple[int, ...]:
    """Return the GPUs that a model may use, in order of use. Empty if the model runs in main memory."""
    gpus = range(len(memory) - 1)
    if config.handler is not None:
        own = {int(index) for group in config.handler.devices for index in group.split(",")}
        return tuple(index for index in gpus if index in own)
    allowed = gpus if config.devices is None else [index for index in config.devices if index in gpus]
    return tuple(sorted(allowed, key=lambda index: (-(memory[index] // _ALIKE), index)))


def sharing_gpus(config: ModelConfig, gpus: int) -> tuple[Sequence[int], Layout]:
    """Return how many GPUs may share each layer (all possible numbers, ascending), and the model's layout.

    If `gpus` is 0, the model runs in main memory, and processes are counted instead of GPUs.
    """
    if config.handler is not None:
        workers = len(config.handler.devices) or 1
        return ((gpus or 1) // workers or 1,), Layout(replicas=workers, replicas_here=workers)
    if not is_vllm(config):
        return ((gpus or 1) if "device_map" in config.engine_arguments else 1,), Layout()
    layout = _layout(config)
    if config.tensor_parallel_degree is not None or not gpus:
        return (config.tensor_parallel_degree or 1,), layout
    most = layout.most(gpus)
    return range(most if config.tensor_parallel_max else 1, most + 1), layout


def gpus_asked_for(config: ModelConfig) -> int:
    """Return the minimum number of this machine's GPUs that the model's settings ask for."""
    return _layout(config).gpus(config.tensor_parallel_degree or 1) * (config.max_copies or 1)


def _layout(config: ModelConfig) -> Layout:
    return Layout.of({**config.engine_arguments, "pipeline_parallel_size": config.pipeline_parallel_degree})


def integer(text: str) -> int:
    """Return an engine argument as a number, or 0 if the argument is not a number."""
    return int(text) if text.strip().isdecimal() else 0
