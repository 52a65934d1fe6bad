"""Continues the requests of a dead copy in another copy, or in its replacement.

The other copy gets the prompt and the received tokens as one prompt. The state of the sequence in the server's process
stays, with its text, its counts and its log probabilities. So the client gets each token once.

This is exact only if the next token depends on all earlier tokens in the same way, whether they come from the prompt or
from the answer. `continued` refuses other requests.
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
"""A key in vLLM's `reasoning_parser_kwargs`: how many tokens at the end of the prompt belong to the answer.

Clients cannot set it: vLLM's front end puts all that comes from clients under one key, `chat_template_kwargs`. vLLM
passes `reasoning_parser_kwargs` to the reasoning parser only if the constraint begins after the reasoning. `continued`
refuses such requests, so no parser gets the key.
"""


class CannotContinue(Exception):
    """The continued answer might differ from the answer that the dead copy would have generated.

    The message gives the reason.
    """


def continued(state: RequestState, config: VllmConfig) -> EngineCoreRequest:
    """Return the request for the rest of a sequence.

    Raises:
        CannotContinue: The rest may depend on a lost state.
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
    params.prompt_logprobs = params.prompt_logprob_token_ids = None  # The client has got them with the first token.
    rest = msgspec.structs.replace(request, prompt_token_ids=[*prompt, *sent], sampling_params=params)
    if params.structured_outputs is not None:
        rest.reasoning_parser_kwargs = {**(request.reasoning_parser_kwargs or {}), SENT: len(sent)}
    return rest


def _loss(request: EngineCoreRequest, params: Any, config: VllmConfig) -> str | None:
    """Return the reason why the rest of an answer may depend on a lost state; None if it does not."""
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
    outputs_config = config.structured_outputs_config
    after_reasoning = outputs_config.reasoning_parser and not outputs_config.enable_in_reasoning
    if params.structured_outputs is not None and after_reasoning and not request.reasoning_ended:
        return "the constraint begins where the reasoning ends"
    processors = config.model_config.logits_processors or ()
    if not all(isinstance(name, str) and name.startswith("engines.vllm.") for name in processors):
        return "option.logits_processors may count the tokens of the answer"
    return None


def advance(grammar: Any, request: Any) -> None:
    """In the engine process, advance the grammar of a continued request past the tokens that were already sent.

    Raises:
        ValueError: The grammar refuses the tokens.
    """
    sent: int = (request.structured_output_request.reasoning_parser_kwargs or {}).get(SENT, 0)
    if sent and not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-sent:])):
        raise ValueError("the constraint does not allow the answer so far")


class Continuations:
    """The sequences of an engine, which outlive the copies that run them.

    If a copy dies, its sequences go to the copies that serve, or wait for the next copy. If more copies than allowed
    have died while they ran a sequence, the sequence is a suspect, because it may have killed them. Suspects wait for
    the next copy that is started, and are sent to it before all other sequences. They are sent one by one: each suspect
    waits until the suspect before it has a new token. If this copy dies too, the suspect that was sent last gets the
    error. It is the likely cause, but not a certain one: an earlier suspect may kill the copy with a later token. A
    sequence can kill two copies more than allowed: the copy whose death makes it a suspect, and the copy that tries it.
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
            deaths: The number of copies that may die while they run a sequence. After one more death, the sequence is a
                suspect.
        """
        self._llm, self._client, self._statistics = llm, client, statistics
        self._adapters, self._allowed = adapters, deaths
        # For each sequence id: the number of copies that died while they ran the sequence.
        self._deaths: Counter[str] = Counter()
        self._trials: dict[Copy, RequestState] = {}  # For each copy: the suspect that it is trying.
        self._failed: set[str] = set()  # Sequences that have got an error, but are not removed yet.

    def copy_died(self, copy: Copy, lost: Collection[str]) -> None:
        """Count the death for all sequences of a copy. If the copy was trying a suspect, blame only the suspect.

        Args:
            copy: The copy.
            lost: The ids of the copy's sequences.
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
        """Send the waiting sequences to a new copy: first the suspects one by one, and then the others."""
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
        """Send the waiting sequences, except suspects, to the copies that serve."""
        await self._client.handled()
        await self._send_all(self._waiting(suspects=False), Counter(), None)

    def fail_suspects(self) -> None:
        """Give an error to the waiting suspects, because no other copy will be started."""
        if self._deaths:
            for state in self._waiting(suspects=True):
                self._fail(state)

    def _waiting(self, *, suspects: bool) -> list[RequestState]:
        """Return the sequences without a copy."""
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
            await asyncio.sleep(0)  # Let other tasks run.
        self._statistics.continued_requests += len(sent)
        if sent or refused:
            lost = "; ".join(f"{count} cannot be: {why}" for why, count in refused.items())
            logger.info("%d requests are continued%s", len(sent), lost and f"; {lost}")

    async def _send(self, state: RequestState, refused: Counter[str], copy: Copy | None) -> bool:
        """Send a sequence to a copy, or to any copy that serves. Return False if that is not possible."""
        known = state.request_id
        if known not in async_llm.request_states(self._llm) or known in self._client.placed:
            return False  # The client has left, or another copy has the sequence.
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
