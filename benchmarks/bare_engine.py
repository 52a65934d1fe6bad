"""The baseline: vLLM's `AsyncLLM` without HTTP, under the same load, in a separate process.

The command takes the engine arguments as one JSON object. The process reads one `EngineLoad` per line from standard
input, and answers each one with a line of JSON, the `Figures`. Before that, it writes `{}` when the engine is ready. It
exits when its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from typing import IO, Any

import msgspec
import uvloop

from benchmarks.load import Figures, Tally, Waves, clock


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One load run: the request, the number of clients and the duration."""

    name: str  # The kind of load.
    prompt: str
    tokens: int
    stream: bool
    logprobs: bool = False
    texts: int = 0  # The number of texts in a request for vectors. 0: the request is for generated text.
    concurrency: int
    seconds: float
    timeout: float


class BareRun:
    """One load run. Each client is a task that iterates over `AsyncLLM.generate`."""

    def __init__(self, llm: Any, load: EngineLoad) -> None:
        self._llm = llm
        self._load = load
        self._tally = Tally()
        self._waves = Waves(load.seconds)
        self._sampling = _sampling(load)

    async def run(self) -> Figures:
        clients = [asyncio.create_task(self._client(number)) for number in range(self._load.concurrency)]
        _, unfinished = await asyncio.wait(clients, timeout=self._load.timeout)
        for task in unfinished:
            task.cancel()
            self._tally.failed(f"unfinished after {self._load.timeout:g} s")
        await asyncio.gather(*clients, return_exceptions=True)
        return self._tally.figures()

    async def _client(self, number: int) -> None:
        made = 0
        while self._waves.admits(made):
            made += 1
            try:
                await self._request(f"{id(self):x}-{number}-{made}")
            except Exception as error:
                self._tally.failed(f"{type(error).__name__}: {error}")
                return

    async def _request(self, request_id: str) -> None:
        started = clock()
        first = last = 0.0
        tokens = records = 0
        async for output in self._llm.generate({"prompt": self._load.prompt}, self._sampling, request_id):
            now = clock()
            if first:
                self._tally.gap(now - last)
            first, last = first or now, now
            tokens += len(output.outputs[0].token_ids)
            records += 1
        if tokens == self._load.tokens:
            self._tally.answered(tokens=tokens, records=records, first_s=first - started, total_s=clock() - started)
        else:
            self._tally.failed(f"{tokens} tokens instead of {self._load.tokens}")


def _sampling(load: EngineLoad) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=load.tokens,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0 if load.logprobs else None,
        output_kind=RequestOutputKind.DELTA if load.stream else RequestOutputKind.FINAL_ONLY,
    )


async def _serve(arguments: dict[str, Any], answers: IO[bytes]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM's default batch sizes depend on the usage context. vLLM's server uses the same context.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER)
    gc.collect()
    gc.freeze()
    try:
        answers.write(b"{}\n")
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            figures = await BareRun(llm, msgspec.json.decode(line, type=EngineLoad)).run()
            answers.write(msgspec.json.encode(figures) + b"\n")
    finally:
        llm.shutdown()


def main() -> None:
    """Serve the loads that arrive on standard input."""
    # Only answers go to the original standard output. The output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(json.loads(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
