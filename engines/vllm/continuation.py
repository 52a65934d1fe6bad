"""The requests of an engine process that has died continue in the next one.

The next process gets the prompt and the tokens that have come as one prompt. The state in the server's process, with
its text, its counts and its log probabilities, stays. So the client gets each token once.

This is exact only if the next token depends on the tokens before it, and not on which of them are the prompt's.
`continued` refuses the other requests.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from typing import Any

import msgspec
from vllm.config import VllmConfig

from engines.errors import EngineDead
from engines.statistics import EngineStatistics
from engines.vllm import internals
from engines.vllm.internals import AsyncLLM, EngineCoreRequest, RequestState
from engines.vllm.lora import VllmAdapters
from engines.vllm.output import OwnState

logger = logging.getLogger(__name__)

_TRIAL_POLL_SECONDS = 0.02

SENT = "slipway_sent_tokens"
"""The name, in vLLM's `reasoning_parser_kwargs`, of how many of the prompt's last tokens are of the answer.

vLLM's front end gives these one key, `chat_template_kwargs`, which holds all that comes from the client. Without a
reasoning parser vLLM does not read them, and with one only if the constraint begins where the reasoning ends.
"""


class CannotContinue(Exception):
    """The answer could differ from that of an engine that had not died. The message says why."""


def continued(state: RequestState, config: VllmConfig) -> EngineCoreRequest:
    """Return the request for the rest of a sequence.

    Raises:
        CannotContinue: The rest may depend on a state that is lost.
    """
    request: EngineCoreRequest | None = state.core_request
    if request is None:
        raise CannotContinue("its images or sounds are not kept")
    if request.resumable:
        raise CannotContinue("its prompt comes in parts")
    sent: list[int] = [] if state.detokenizer is None else list(state.detokenizer.output_token_ids)
    if not sent:
        return request
    prompt, given = request.prompt_token_ids, request.sampling_params
    if prompt is None or given is None:
        raise CannotContinue("its prompt has no tokens")
    if (loss := _loss(request, given, config)) is not None:
        raise CannotContinue(loss)
    params = copy.copy(given)
    if params.max_tokens is not None:
        params.max_tokens -= len(sent)
    params.min_tokens = max(params.min_tokens - len(sent), 0)
    params.prompt_logprobs = params.prompt_logprob_token_ids = None  # They came with the first token.
    rest = msgspec.structs.replace(request, prompt_token_ids=[*prompt, *sent], sampling_params=params)
    if params.structured_outputs is not None:
        rest.reasoning_parser_kwargs = {**(request.reasoning_parser_kwargs or {}), SENT: len(sent)}
    return rest


def _loss(request: EngineCoreRequest, params: Any, config: VllmConfig) -> str | None:
    """Return the reason why the rest of an answer may depend on a lost state. None if it does not."""
    if params.presence_penalty or params.frequency_penalty:
        return "presence_penalty and frequency_penalty count the tokens of the answer alone"
    if params.seed is not None and params.temperature:
        return "the place in the random numbers of its seed is lost"
    if any(len(word) > 1 for word in params.bad_words_token_ids or ()):
        return "bad_words of several tokens are looked for in the answer alone"
    if params.thinking_token_budget is not None:
        return "thinking_token_budget counts the tokens of the answer alone"
    if params.repetition_detection is not None:
        return "repetition_detection looks at the answer alone"
    if (params.extra_args or {}).get("kv_transfer_params"):
        return "its cache came from another server"
    if params.structured_outputs is not None and not _is_constrained_from_start(request, config):
        return "the constraint begins where the reasoning ends"
    if any(not _is_own(name) for name in config.model_config.logits_processors or ()):
        return "option.logits_processors may count the tokens of the answer"
    return None


def _is_constrained_from_start(request: EngineCoreRequest, config: VllmConfig) -> bool:
    settings = config.structured_outputs_config
    return bool(request.reasoning_ended or not settings.reasoning_parser or settings.enable_in_reasoning)


def _is_own(processor: Any) -> bool:
    return isinstance(processor, str) and processor.startswith("engines.vllm.")


def advance(grammar: Any, request: Any) -> None:
    """Advance the grammar of a continued request over the tokens that have come. For the engine process.

    Raises:
        ValueError: The grammar refuses them.
    """
    sent: int = (request.structured_output_request.reasoning_parser_kwargs or {}).get(SENT, 0)
    if sent and not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-sent:])):
        raise ValueError("the constraint does not allow the answer so far")


class Continuations:
    """The sequences of one engine, which outlive its processes.

    Sequences that ran at more deaths than allowed are suspects: one of them may have killed the engine. They are sent
    one by one, each after the token of the one before it. If the engine dies again, the latest gets the error. It is
    the likely cause, not a certain one: an earlier suspect may kill the engine with a later token.
    """

    def __init__(self, llm: AsyncLLM, statistics: EngineStatistics, adapters: VllmAdapters | None, deaths: int) -> None:
        """Create the continuations.

        Args:
            deaths: Deaths of the engine after which a sequence continues together with the others.
        """
        self._llm, self._statistics, self._adapters, self._allowed = llm, statistics, adapters, deaths
        self._deaths: Counter[str] = Counter()  # At which a sequence ran, by its id.
        self._absent: set[str] = set()  # Sequences that the present process does not have.
        self._on_trial: RequestState | None = None

    def engine_died(self) -> None:
        """Count the death for the sequences that ran, or blame the one that was tried."""
        states = internals.request_states(self._llm)
        self._deaths = Counter({known: count for known, count in self._deaths.items() if known in states})
        if (suspect := self._on_trial) is None:
            self._deaths.update(states.keys() - self._absent)
            return
        self._on_trial = None
        logger.error(
            "request %s: the engine died before this request had its next token: it is refused", suspect.external_req_id
        )
        _fail(suspect)

    def engine_replaced(self) -> None:
        """Take all sequences as absent. No message has gone to the new process yet."""
        self._absent = set(internals.request_states(self._llm))

    async def send_all(self) -> None:
        """Send the sequences to the new process: the suspects one by one, and then the others."""
        if self._adapters is not None:
            await self._adapters.load_again()
        states = [state for known, state in internals.request_states(self._llm).items() if known in self._absent]
        refusals: Counter[str] = Counter()
        requests: set[str] = set()
        suspects = [state for state in states if self._deaths[state.request_id] > self._allowed]
        for state in suspects:
            logger.warning(
                "request %s ran when the engine died more than once: it is tried before others", state.external_req_id
            )
            await self._try(state, refusals, requests)
        others = [state for state in states if self._deaths[state.request_id] <= self._allowed]
        for state in others:
            await self._send(state, refusals, requests)
            await asyncio.sleep(0)  # Other tasks get their turn.
        self._statistics.continued_requests += len(requests)
        lost = "; ".join(f"{count} cannot be: {why}" for why, count in refusals.items())
        logger.info("%d requests are continued%s", len(requests), lost and f"; {lost}")

    async def _try(self, state: RequestState, refusals: Counter[str], requests: set[str]) -> None:
        """Send one sequence, and wait for its next token or its end. A death ends the wait by a cancellation."""
        self._on_trial = state
        before = _tokens(state)
        await self._send(state, refusals, requests)
        while state.request_id in internals.request_states(self._llm) and _tokens(state) == before:
            await asyncio.sleep(_TRIAL_POLL_SECONDS)
        self._on_trial = None

    async def _send(self, state: RequestState, refusals: Counter[str], requests: set[str]) -> None:
        known = state.request_id
        if known not in internals.request_states(self._llm):  # its client has left
            return
        try:
            request = continued(state, self._llm.vllm_config)
            adapter = request.lora_request
            if adapter is not None and not (self._adapters and self._adapters.is_loaded(adapter.lora_int_id)):
                raise CannotContinue("its adapter cannot be loaded again")
        except CannotContinue as error:
            refusals[str(error)] += 1
            _fail(state)
            return
        self._absent.discard(known)
        requests.add(state.external_req_id)
        await internals.send(self._llm, request)


def _fail(state: RequestState) -> None:
    """End a sequence with the error of a dead engine."""
    if isinstance(state, OwnState):
        state.fail(EngineDead())
    else:
        internals.fail(state, EngineDead().message)


def _tokens(state: RequestState) -> int:
    return state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
