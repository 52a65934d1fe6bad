"""TensorRT-LLM as an engine: its LLM API, on PyTorch (contracts/lmi.md section 2.14).

Written for TensorRT-LLM 1.2 to 1.4. The package wants CUDA to be imported, and other versions of torch and
transformers than vLLM does: it has an image of its own. Beside the documented API, `_alive` asks the `LLM` for its
health by a method that its own server uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from handlers.daemon_thread import in_daemon_thread
from handlers.engines.beam_search import submit_beam_search
from handlers.engines.model_texts import ModelTexts, copied
from handlers.engines.progress import Progress
from handlers.engines.prompt import PromptTokenizer
from handlers.engines.protocol import EngineHealth, EngineStartError, EngineStatus, Generation, Sink
from handlers.engines.sequences import SequenceGroup
from handlers.engines.start_failure import failure_of
from handlers.engines.tensorrt_llm_arguments import Arguments, engine_arguments
from handlers.engines.tensorrt_llm_loading import ModelFacts, gpu_count, import_tensorrt_llm, read_model
from handlers.engines.tensorrt_llm_output import GeneratedSequence, TokenizerFacts
from handlers.engines.tensorrt_llm_sampling import SamplingTranslator, abilities
from handlers.engines.token_text import split_text
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter, InvalidRequest
from handlers.meter import Meter
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest, Token

logger = logging.getLogger(__name__)

SUBMITS_PER_TURN = 16
"""After so many sequences others get their turn on the event loop."""
_WATCH_SECONDS = 0.25
_SHUTDOWN_SECONDS = 10.0


class TensorRtLlmEngine:
    """One model on TensorRT-LLM, which runs in processes of its own."""

    adapters = None

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self.meter = Meter()
        self._running: dict[GeneratedSequence, _Run] = {}
        self._progress = Progress()
        self._outputs = 0
        self._dead = ""
        self._stopped = False

    async def start(self) -> None:
        """See `Engine.start`. Takes minutes for a large model; other tasks go on meanwhile."""
        limit = self._settings.model_loading_timeout
        try:
            await asyncio.wait_for(in_daemon_thread(self._load), limit)
        except TimeoutError:
            raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
        except EngineStartError:
            raise
        except Exception as error:
            raise failure_of(error).error(f"TensorRT-LLM cannot load {self._settings.model_id}") from error
        self._watchdog = asyncio.create_task(self._watch())

    def _load(self) -> None:
        self._api, version = import_tensorrt_llm()
        model = read_model(self._settings)
        arguments = engine_arguments(self._settings, self._api, gpu_count(), model.context)
        self._llm = self._api.LLM(**arguments.llm)
        self._attach(arguments, model, version)

    def _attach(self, arguments: Arguments, model: ModelFacts, version: tuple[int, ...]) -> None:
        # TensorRT-LLM wraps the tokenizer of transformers.
        self.tokenizer = getattr(self._llm.tokenizer, "tokenizer", self._llm.tokenizer)
        self.texts = ModelTexts(copied(self.tokenizer))
        tokenizer = self.texts.tokenizer
        own = tokenizer.eos_token_id
        self.eos_token_ids = model.eos_token_ids | (frozenset() if own is None else {own})
        self._facts = TokenizerFacts(tokenizer, self.texts.special_ids, self.eos_token_ids)
        self.max_model_len = arguments.max_model_len
        self._max_input_len = arguments.max_input_len
        self.max_sequences = arguments.max_batch_size
        can = abilities(version, arguments.sampler, arguments.max_logprobs)
        self.max_top_tokens = can.max_top_tokens
        self._prompts = PromptTokenizer(self.texts, self.max_model_len, self._settings.max_prompt_tokens)
        self._translator = SamplingTranslator(
            make=self._api.SamplingParams,
            max_model_len=self.max_model_len,
            vocabulary_size=model.vocabulary_size or len(tokenizer),
            abilities=can,
            further_eos_token_ids=tuple(sorted(self.eos_token_ids - {own})),
        )

    async def _watch(self) -> None:
        """See to it that no client waits for ever: not for a dead engine, nor for one that gives it no token."""
        while self._alive():
            await asyncio.sleep(_WATCH_SECONDS)
            self._look()
            self._end_overdue()
        self._die()

    def _look(self) -> None:
        """TensorRT-LLM tells of tokens alone: with nothing to do it gives no sign of life, and is taken to be well."""
        if not self._running:
            self._outputs += 1
        self._progress.look(bool(self._running), self._outputs)

    def _alive(self) -> bool:
        check = getattr(self._llm, "_check_health", None)
        if check is not None:
            return bool(check())
        executor = self._llm._executor
        return executor is not None and not executor.is_shutdown()

    def _die(self) -> None:
        if not (self._stopped or self._dead):
            self._dead = "the engine has died"
            logger.error("TensorRT-LLM has died")
            self._fail_all(EngineDead())

    def _fail_all(self, error: EngineDead) -> None:
        for sequence, run in list(self._running.items()):
            sequence.fail(error)
            run.task.cancel()
        self._running.clear()

    def _end_overdue(self) -> None:
        limit = self._settings.predict_timeout
        overdue = time.monotonic() - limit
        for sequence, run in list(self._running.items()):
            if sequence.last_at < overdue and not sequence.ended:
                sequence.fail(GenerationFailed(f"no token within predict_timeout ({limit:g} s)"))
                self._drop(sequence, run)

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """See `Engine.submit`."""
        self._check_alive()
        if request.beam_search is not None:
            if self.max_top_tokens == 0:
                raise InvalidParameter(
                    "num_beams", "above 1 needs log probabilities, which option.sampler_type rules out"
                )
            self._translator.check(request)
            return await submit_beam_search(self, request, request.beam_search, sink)
        token_ids = await self.prompt_token_ids(request)
        self._check_alive()  # a long prompt is tokenized elsewhere meanwhile
        parameters = [
            self._translator.sampling_params(request, len(token_ids), index) for index in range(request.candidates)
        ]
        target = sink
        if request.candidates > 1:
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        generation = _Generation(self)
        try:
            for index, params in enumerate(parameters):
                if index % SUBMITS_PER_TURN == SUBMITS_PER_TURN - 1:
                    await asyncio.sleep(0)
                sequence = GeneratedSequence(request, token_ids, self._facts, target, self.meter, index)
                self._begin(sequence, token_ids, params)
                generation.sequences.append(sequence)
        except (ValueError, self._api.RequestError) as error:
            generation.cancel()
            raise InvalidRequest(_first_line(error)) from error
        except BaseException:
            generation.cancel()
            self._check_alive()
            raise
        self.meter.started_requests += 1
        self.meter.prompt_tokens += len(token_ids)
        return generation

    def _check_alive(self) -> None:
        if self._stopped or self._dead or not self._alive():
            raise EngineDead

    def _begin(self, sequence: GeneratedSequence, token_ids: list[int], params: Any) -> None:
        # Streaming even where the client does not: stop strings and stalled requests are found token by token.
        result = self._llm.generate_async(token_ids, sampling_params=params, streaming=True)
        self._running[sequence] = _Run(result, asyncio.create_task(self._follow(sequence, result)))

    async def _follow(self, sequence: GeneratedSequence, result: Any) -> None:
        try:
            async for _ in result:
                self._outputs += 1
                sequence.take(result.outputs[0], result.finished)
                if sequence.ended:
                    break
            if not sequence.ended:
                sequence.fail(GenerationFailed("TensorRT-LLM ended it without a reason"))
        except self._api.RequestError as error:
            sequence.fail(GenerationFailed(f"TensorRT-LLM refused to go on: {_first_line(error)}"))
        except Exception:
            logger.exception("a sequence failed in TensorRT-LLM")
            if not self._alive():
                self._die()
            sequence.fail(GenerationFailed("internal error while handling a token"))
        finally:
            run = self._running.pop(sequence, None)
            if run is not None:
                self._abort(result)

    def _drop(self, sequence: GeneratedSequence, run: _Run) -> None:
        """Stop generating a sequence that has ended for us."""
        del self._running[sequence]
        run.task.cancel()
        self._abort(run.result)

    def _abort(self, result: Any) -> None:
        if result.finished or self._dead or self._stopped or not self._alive():
            return
        try:
            result.abort()
        except Exception:
            # It may have ended in TensorRT-LLM's own processes a moment ago, and the client has its answer anyway.
            logger.warning("a request could not be aborted in TensorRT-LLM", exc_info=True)

    def cancel(self, sequences: Sequence[GeneratedSequence]) -> None:
        """Stop generating `sequences`; nothing more reaches their sink."""
        for sequence in sequences:
            sequence.cancel()
            self._stop_generating(sequence)

    def abort(self, sequences: Sequence[GeneratedSequence]) -> None:
        """Stop generating `sequences`, and hand over what there is of them."""
        for sequence in sequences:
            sequence.abort()
            self._stop_generating(sequence)

    def _stop_generating(self, sequence: GeneratedSequence) -> None:
        if (run := self._running.get(sequence)) is not None:
            self._drop(sequence, run)

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        """See `Engine.prompt_token_ids`."""
        token_ids = await self._prompts.token_ids(request)
        most = self._max_input_len
        if most is not None and len(token_ids) > most:
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens; option.max_input_len allows {most}")
        return token_ids

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        """See `Engine.detokenize`."""
        facts = self._facts
        return split_text(facts.tokenizer, token_ids, facts.special_ids, skip_special_tokens, prompt_ids)

    def health(self) -> EngineHealth:
        """See `Engine.health`."""
        if self._stopped:
            return EngineHealth(False, "the engine is stopped")
        if self._dead:
            return EngineHealth(False, self._dead)
        return EngineHealth(True, quiet_seconds=self._progress.quiet_seconds, mark=self._progress.mark)

    def status(self) -> EngineStatus:
        """See `Engine.status`; what the KV cache holds is known to TensorRT-LLM's own processes alone."""
        running = min(len(self._running), self.max_sequences)
        return EngineStatus(running, len(self._running) - running, 0.0)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.cancel()
        self._fail_all(EngineDead("the server is stopping; the request was not completed"))
        try:
            await asyncio.wait_for(in_daemon_thread(self._llm.shutdown), _SHUTDOWN_SECONDS)
        except TimeoutError:
            logger.warning("TensorRT-LLM did not stop within %g s; its processes end with this one", _SHUTDOWN_SECONDS)


@dataclass(frozen=True, slots=True)
class _Run:
    result: Any
    task: asyncio.Task[None]


class _Generation:
    def __init__(self, engine: TensorRtLlmEngine) -> None:
        self._engine = engine
        self.sequences: list[GeneratedSequence] = []

    def cancel(self) -> None:
        sequences, self.sequences = self.sequences, []
        self._engine.cancel(sequences)

    def abort(self) -> None:
        sequences, self.sequences = self.sequences, []
        self._engine.abort(sequences)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
