"""The requests of a copy that has died continue in another one, or in the copy that replaces it.

The other copy gets the prompt and the tokens that have come as one prompt. The state in the server's process, with
its text, its counts and its log probabilities, stays. So the client gets each token once.

This is exact only if the next token depends on the tokens before it, and not on which of them are the prompt's.
`continued` refuses the other requests.
"""

from __future__ import annotations

import asyncio
import copy as copying
import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from engines.errors import EngineDead
from engines.statistics import EngineStatistics
from engines.vllm import async_llm
from engines.vllm.copies import core_client
from engines.vllm.copies.client import CopiesClient, Copy
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
    """The answer could differ from the answer without a death. The message says why."""


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
    if core_client.is_compared_with_query(request):
        raise CannotContinue("the vectors of its query are lost")
    sent: list[int] = [] if state.detokenizer is None else list(state.detokenizer.output_token_ids)
    if not sent:
        return request
    prompt, given = request.prompt_token_ids, request.sampling_params
    if prompt is None or given is None:
        raise CannotContinue("its prompt has no tokens")
    if (loss := _loss(request, given, config)) is not None:
        raise CannotContinue(loss)
    params = copying.copy(given)
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
    """The sequences of an engine, which outlive the copies that have them.

    If a copy dies, its sequences go to the copies that serve, or wait for the next one. Sequences that ran at more
    deaths than allowed are suspects: one of them may have killed the copies. They wait for the next copy that is
    started, and are sent to it before it takes others: one by one, each after the token of the one before it. If the
    copy dies again, the latest gets the error. It is the likely cause, not a certain one: an earlier suspect may kill
    the copy with a later token. So a sequence kills two copies at most, and then the copy that tries it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        client: CopiesClient,
        statistics: EngineStatistics,
        adapters: VllmAdapters | None,
        deaths: int,
    ) -> None:
        """Create the continuations.

        Args:
            deaths: Deaths of copies after which a sequence continues together with others.
        """
        self._llm, self._client, self._statistics = llm, client, statistics
        self._adapters, self._allowed = adapters, deaths
        self._deaths: Counter[str] = Counter()  # At which a sequence ran, by its id.
        self._trials: dict[Copy, RequestState] = {}  # The suspect that is being tried.
        self._failed: set[str] = set()  # Sequences that have got an error, and still have to be removed.

    def copy_died(self, copy: Copy, lost: Collection[str]) -> None:
        """Count the death for the sequences that the copy had, or blame the sequence that was tried there.

        Args:
            copy: The copy.
            lost: The ids of its sequences.
        """
        states = async_llm.request_states(self._llm)
        self._deaths = Counter({known: count for known, count in self._deaths.items() if known in states})
        self._failed.intersection_update(states)
        if (suspect := self._trials.pop(copy, None)) is None:
            self._deaths.update(request_id for request_id in lost if request_id in states)
            return
        logger.error(
            "request %s: copy %d died before this request had its next token: it is refused",
            *(suspect.external_req_id, copy.number),
        )
        self._fail(suspect)

    async def send_to(self, copy: Copy) -> None:
        """Send the waiting sequences to a copy that was started: the suspects one by one, and then the others."""
        await self._client.handled()
        refused: Counter[str] = Counter()
        for state in self._waiting(suspects=True):
            logger.warning(
                "request %s ran when copies died more than once: it is tried before others", state.external_req_id
            )
            before = _tokens(state)
            if not await self._send(state, refused, copy):
                continue
            self._trials[copy] = state
            while state.request_id in async_llm.request_states(self._llm) and _tokens(state) == before:
                await asyncio.sleep(_TRIAL_POLL_SECONDS)
            self._trials.pop(copy, None)
        await self._send_all(self._waiting(suspects=False), refused, copy)

    async def send_on(self) -> None:
        """Send the waiting sequences that are no suspects to the copies that serve."""
        await self._client.handled()
        await self._send_all(self._waiting(suspects=False), Counter(), None)

    def fail_suspects(self) -> None:
        """Give an error to the suspects that no copy has: no other copy will be started."""
        if self._deaths:
            for state in self._waiting(suspects=True):
                self._fail(state)

    def _waiting(self, *, suspects: bool) -> list[RequestState]:
        """Return the sequences that no copy has."""
        states, placed = async_llm.request_states(self._llm), self._client.placed
        return [
            state
            for known, state in states.items()
            if known not in placed and known not in self._failed and (self._deaths[known] > self._allowed) is suspects
        ]

    async def _send_all(self, states: Collection[RequestState], refused: Counter[str], copy: Copy | None) -> None:
        sent = set()
        for state in states:
            if await self._send(state, refused, copy):
                sent.add(state.external_req_id)
            await asyncio.sleep(0)  # Other tasks get their turn.
        self._statistics.continued_requests += len(sent)
        if sent or refused:
            lost = "; ".join(f"{count} cannot be: {why}" for why, count in refused.items())
            logger.info("%d requests are continued%s", len(sent), lost and f"; {lost}")

    async def _send(self, state: RequestState, refused: Counter[str], copy: Copy | None) -> bool:
        """Send a sequence to a copy, or to any that serves. Returns False if that is not possible."""
        known = state.request_id
        if known not in async_llm.request_states(self._llm) or known in self._client.placed:
            return False  # Its client has left, or another copy has got it.
        try:
            request = continued(state, self._llm.vllm_config)
            adapter = request.lora_request
            if adapter is not None and not (self._adapters and self._adapters.is_loaded(adapter.lora_int_id)):
                raise CannotContinue("its adapter cannot be loaded again")
        except CannotContinue as error:
            refused[str(error)] += 1
            self._fail(state)
            return False
        await self._client.add_request_async(request, copy)
        return known in self._client.placed  # All copies may have died before it was sent.

    def _fail(self, state: RequestState) -> None:
        """End a sequence with the error of a dead engine."""
        self._failed.add(state.request_id)
        fail(state)


def fail(state: RequestState) -> None:
    """Give the error of a dead engine to a sequence of Slipway or of vLLM's front end."""
    if isinstance(state, OwnState):
        state.fail(EngineDead())
    else:
        async_llm.fail(state, EngineDead().message)


def _tokens(state: RequestState) -> int:
    return state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
