"""`python -m benchmarks`: compares Slipway with other servers on the same engine, and with the engine alone.

`__main__` parses the options. `rounds` starts the servers (`peers`) and measures them in turn. `load` is the load
client. `report` writes tables and plots. Without a model, `scripted_front_end` runs a front end on a
`scripted_engine`. `floor` is a front end that does the least possible work. `shares` measures how evenly calls are
distributed over the copies of a model.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import msgspec
import typer

from benchmarks.bare_engine import EngineLoad
from benchmarks.peers import CONTRACTS, PEERS, Engine, EngineArguments, ServerError
from benchmarks.report import markdown, plots, shares_table
from benchmarks.rounds import Sample, Workload, run
from benchmarks.shares import Shares
from benchmarks.shares import measure as measure_shares
from benchmarks.tiny_model import prepare_tiny_encoder, prepare_tiny_llama
from container.gpus import gpu_count
from container.sources.sample_model import prepare

PROMPT = "Tell me a long story about a ship that leaves the slipway and about the people who built her."
CPU_ARGUMENTS: EngineArguments = {
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
GPU_ARGUMENTS: EngineArguments = {
    "max_model_len": 2048,
    "max_num_seqs": 1024,
    "enable_prefix_caching": False,
    # The peers share one GPU. No peer may take all of the free memory, because the others also need some.
    "gpu_memory_utilization": 0.3,
}


class WorkloadChoice(StrEnum):
    """The values of `--workload`."""

    SAMPLE = "a"
    TINY = "b"
    BOTH = "both"
    FRONT_END = "front-end"
    VECTORS = "vectors"
    VECTORS_FRONT_END = "vectors-front-end"
    COPIES = "copies"


# The names of the workloads of a choice, if they differ from the choice.
WORKLOADS = {
    WorkloadChoice.SAMPLE: ["sample"],
    WorkloadChoice.TINY: ["tiny"],
    WorkloadChoice.BOTH: ["sample", "tiny"],
}
_SCRIPTED = (WorkloadChoice.FRONT_END, WorkloadChoice.VECTORS_FRONT_END, WorkloadChoice.COPIES)


# The workloads for which this program creates a model.
TINY_MODELS = {
    "tiny": prepare_tiny_llama,
    "vectors": prepare_tiny_encoder,
    "vectors-front-end": prepare_tiny_encoder,
}


class Defaults(NamedTuple):
    """The defaults of some options. They depend on the workload."""

    peers: str = "slipway,vllm,bare"
    contracts: str = "lmi"
    concurrency: str = "1,8,32,128"


_OF_VECTORS = Defaults("slipway,vllm", "lmi,openai", "1,8,32")
DEFAULTS = {
    WorkloadChoice.FRONT_END: Defaults("slipway,vllm,rust,floor,triton", "lmi,openai,chat,triton", "1,8,32,128,256"),
    WorkloadChoice.VECTORS: _OF_VECTORS,
    WorkloadChoice.VECTORS_FRONT_END: _OF_VECTORS,
    WorkloadChoice.COPIES: Defaults("slipway,slipway-2,slipway-4", "lmi", "32,256"),
}
SHORT_TEXT = "What is Deep Learning?"
BATCH = 32  # The number of texts in a larger request for vectors.
BURST = 128  # The number of requests that start at the same time.


class Device(StrEnum):
    """The device of the engines."""

    CPU = "cpu"
    GPU = "gpu"


def main(
    workload: Annotated[
        WorkloadChoice,
        typer.Option(
            help="a: the sample model; b: a tiny Llama, so that the front end is the limit; "
            "front-end: a scripted engine without a model; vectors: a tiny encoder; "
            "vectors-front-end: vectors from the scripted engine; "
            "copies: one, two and four scripted engines behind one front end."
        ),
    ] = WorkloadChoice.BOTH,
    model: Annotated[
        Path | None, typer.Option(help="Directory of another model for workload a, or of the tokenizer for front-end.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Device of the engines. Default: a GPU if the machine has one.")
    ] = None,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="Memory of each peer's KV cache.")] = 1,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Time between two tokens of the scripted engine.")] = 4.0,
    rust: Annotated[
        Path | None, typer.Option(help="Program of vLLM's front end in Rust: vllm/vllm-rs of the GPU wheel.")
    ] = None,
    triton: Annotated[
        Path | None, typer.Option(help="Directory DIR of `pip install --target DIR nvidia-pytriton 'numpy<2'`.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds in which a run starts requests.")] = 4.0,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds of a run. Requests that are unfinished then count as errors.")
    ] = 90.0,
    peers: Annotated[
        str,
        typer.Option(
            help=f"Servers to compare, separated by commas. Ratios are relative to the first. {', '.join(PEERS)}."
        ),
    ] = "",
    contracts: Annotated[
        str, typer.Option(help=f"Contracts of the requests to Slipway, separated by commas: {', '.join(CONTRACTS)}.")
    ] = "",
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which no further load starts. This limits the number of rounds.")
    ] = math.inf,
    quick: Annotated[
        bool, typer.Option("--quick", help="Make one short round with 8 and 32 clients, as a trial.")
    ] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the logs of the servers in this directory.")] = None,
    samples_file: Annotated[Path | None, typer.Option(help="Write the figures of each run to this JSON file.")] = None,
    plot_dir: Annotated[
        Path | None, typer.Option(help="Write plots to this directory, as PNG. Needs matplotlib.")
    ] = None,
) -> None:
    """Print Markdown tables of throughput, times to the first byte and between tokens, and CPU time per token."""
    deadline = time.monotonic() + time_limit
    if quick:
        rounds, concurrency, seconds = 1, "8,32", 1.0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    scripted = workload in _SCRIPTED
    defaults = DEFAULTS.get(workload, Defaults())
    peer_names = _known(peers or defaults.peers, PEERS, "--peers")
    asked = _known(contracts or defaults.contracts, CONTRACTS, "--contracts")
    levels = _levels(concurrency or defaults.concurrency)
    on_gpu = not scripted and (gpu_count() > 0 if device is None else device is Device.GPU)
    samples: list[Sample] = []
    shares: list[Shares] = []
    try:
        for name in WORKLOADS.get(workload, [workload.value]):
            if samples and time.monotonic() > deadline:
                _say(f"{name}: left out, because the time limit has passed")
                continue
            engine = _engine(name, model, on_gpu, kv_cache_gib)
            plan = Workload(
                name=name,
                engine=dataclasses.replace(engine, step_ms=step_ms) if scripted else engine,
                loads=_vector_loads(levels, seconds, timeout)
                if engine.task == "embed"
                else _loads(levels, short=name == "sample" and not on_gpu, seconds=seconds, timeout=timeout),
                rounds=rounds,
            )
            compared = [PEERS[peer](asked, rust, triton) for peer in peer_names]
            with closing(run(plan, compared, log_dir, _say, deadline)) as measured:
                for sample in measured:
                    samples.append(sample)
                    if samples_file is not None:
                        _write(samples_file, samples)
            if workload is WorkloadChoice.COPIES:
                shares += measure_shares(plan.engine, _say)
    except ServerError as error:
        _say(str(error))
        raise typer.Exit(1) from None
    finally:  # This also runs after a signal.
        if samples:
            typer.echo(markdown(samples))
        if shares:
            typer.echo(shares_table(shares))
    if plot_dir is not None:
        try:
            for file in plots(samples, plot_dir):
                _say(f"wrote {file}")
        except ImportError as error:
            _say(f"plots are left out: {error}")
    if any(sample.figures.errors for sample in samples):
        raise typer.Exit(1)


def _engine(name: str, model: Path | None, on_gpu: bool, kv_cache_gib: int) -> Engine:
    tiny = TINY_MODELS.get(name)
    model_dir = tiny() if tiny else model or prepare()
    # The tiny models are stored as float32. For other models, vLLM chooses the type.
    arguments = {**(GPU_ARGUMENTS if on_gpu else CPU_ARGUMENTS), "dtype": "float32" if tiny else "auto"}
    if tiny is prepare_tiny_encoder:
        arguments["runner"] = "pooling"
    return Engine(model_dir=model_dir, arguments=arguments | {"kv_cache_memory_bytes": kv_cache_gib << 30})


def _loads(levels: Sequence[int], *, short: bool, seconds: float, timeout: float) -> tuple[EngineLoad, ...]:
    """Return two loads for each number of clients (streams, and one-token answers), and a burst of streams.

    If `short`, the streams have few tokens.
    """
    tokens = 32 if short else 128
    one = EngineLoad(
        name="streams", prompt=PROMPT, tokens=tokens, stream=True, concurrency=1, seconds=seconds, timeout=timeout
    )
    kinds = (one, msgspec.structs.replace(one, name="one token", tokens=1, stream=False))
    # With `seconds=0.0`, each client sends one request.
    burst = msgspec.structs.replace(one, name="burst", tokens=32, concurrency=BURST, seconds=0.0)
    return *(msgspec.structs.replace(kind, concurrency=level) for kind in kinds for level in levels), burst


def _vector_loads(levels: Sequence[int], seconds: float, timeout: float) -> tuple[EngineLoad, ...]:
    """Return two loads for each number of clients: requests with one text, and requests with many texts."""
    one = EngineLoad(
        name="one text",
        prompt=SHORT_TEXT,
        tokens=1,
        texts=1,
        stream=False,
        concurrency=1,
        seconds=seconds,
        timeout=timeout,
    )
    kinds = (one, msgspec.structs.replace(one, name=f"{BATCH} texts", texts=BATCH, tokens=BATCH))
    return tuple(msgspec.structs.replace(kind, concurrency=level) for kind in kinds for level in levels)


def _write(file: Path, samples: Sequence[Sample]) -> None:
    """Write the samples as one file. Readers never see an incomplete file."""
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(samples)))
    partial.replace(file)


def _known(text: str, known: Iterable[str], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}", param_hint=option
        )
    return names


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(level) for level in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise typer.BadParameter("expected positive numbers, separated by commas", param_hint="--concurrency")
    return levels


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _say(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    typer.run(main)
