"""One sequence as it is generated: from its tokens to deltas, and to its end, as vLLM's own sequences have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.engines.texts import HeldTokens, TokenTexts, prompt_tokens
from handlers.engines.transformers.model import TransformersModel
from handlers.engines.transformers.sampling import Choice
from handlers.request import FinishReason, GenerationRequest, Token, TokenDelta

_CHUNK = 256
"""Tokens in one pass: the logits of all tokens of a long prompt would take gigabytes."""


class GeneratedSequence:
    """Makes deltas of chosen tokens; knows when the sequence ends.

    It ends with the model's end token, a stop token or stop string of the request, its limit on new tokens, or the end
    of the model's context. Text that may turn out to be the beginning of a stop string is held back.
    """

    def __init__(
        self, request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel, sequence: int = 0
    ) -> None:
        s = request.sampling
        self._request, self._model, self._sequence = request, model, sequence
        self._prompt_ids = prompt_ids
        room = model.max_model_len - len(prompt_ids)
        self.limit = room if s.max_tokens is None else min(s.max_tokens, room)
        """Tokens after which it ends for its length."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[float] | None = None
        """To be set before the first token where the request wants the prompt's tokens."""
        self._cumulative_logprob: float | None = None
        self._texts = TokenTexts(model.tokenizer, prompt_ids, s.skip_special_tokens)
        self._stop = StopStrings(s.stop, s.include_stop_str_in_output)
        self._held = ""
        self._pending = HeldTokens()
        self._prompt_tokens_due = request.want_prompt_tokens

    def add(self, choice: Choice) -> TokenDelta | None:
        """Take the next token; returns what there is to tell, if anything.

        The last delta has a `finish_reason`, and `last` set as for a request of a single sequence.
        """
        self.token_ids.append(choice.token_id)
        if choice.logprob is not None:
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + choice.logprob
        self.finish_reason = self._reason(choice.token_id)
        piece = self._piece(choice.token_id)
        self._held += piece
        if self._request.want_tokens:
            self._pending.add(self._token(choice, piece))
        surplus = self._stop.add(piece, count=len(self.token_ids) > self._request.sampling.min_tokens)
        if surplus is not None:
            self.finish_reason = FinishReason.STOP
            self._held = self._held[: len(self._held) - surplus]
        if self.finish_reason is None and not self._request.stream:
            return None
        return self._delta()

    def abort(self) -> TokenDelta | None:
        """End it here; returns the last delta, or None if it has ended already."""
        if self.finish_reason is not None:
            return None
        self.finish_reason = FinishReason.ABORT
        return self._delta()

    def _reason(self, token_id: int) -> FinishReason | None:
        s, eos = self._request.sampling, self._model.eos_token_ids
        ends = token_id in eos and not s.ignore_eos
        # Of several end tokens, one that the request lists is reported as its stop token; the tokenizer's own is not.
        if ends and (token_id not in s.stop_token_ids or token_id == self._model.tokenizer.eos_token_id):
            return FinishReason.EOS
        if token_id in s.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def _piece(self, token_id: int) -> str:
        stopped = self.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        if stopped and not self._request.sampling.include_stop_str_in_output:
            return ""
        return self._texts.add(token_id)

    def _token(self, choice: Choice, piece: str) -> Token:
        special = self._model.special_ids
        ranked = self._request.want_ranks
        top = tuple(
            Token(i, self._model.tokenizer.decode([i]), value, i in special, (), place if ranked else None)
            for place, (i, value) in enumerate(choice.top, start=1)
        )
        rank = choice.rank if ranked else None
        return Token(choice.token_id, piece, choice.logprob, choice.token_id in special, top, rank)

    def _delta(self) -> TokenDelta | None:
        finished = self.finish_reason is not None
        end = len(self._held) - (0 if finished else self._stop.held())
        text, self._held = self._held[:end], self._held[end:]
        tokens = self._pending.release(len(text), finished)
        if not (text or tokens or finished or self._prompt_tokens_due):
            return None
        delta = TokenDelta(text, tokens, self._sequence, None, len(self._prompt_ids), len(self.token_ids))
        delta.cumulative_logprob = self._cumulative_logprob
        if self._prompt_tokens_due:
            self._prompt_tokens_due = False
            model, logprobs = self._model, self.prompt_logprobs or ()
            delta.prompt_tokens = prompt_tokens(model.tokenizer, self._prompt_ids, model.special_ids, logprobs)
        if finished:
            delta.finish_reason = self.finish_reason
            delta.last = True
        return delta


class StopStrings:
    """Finds the first stop string in a growing text, and says how much of the text is safe to show."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._reach = max(map(len, self._stop), default=1) - 1
        self._tail = ""

    def add(self, text: str, count: bool) -> int | None:
        """Take what was added; where a stop string ends in it, how many characters of the text are to be taken back.

        Without `count` the text is taken note of, but a stop string that ends in it does not.
        """
        if not self._stop or not text:
            return None
        whole = self._tail + text
        surplus = self._surplus(whole, len(self._tail)) if count else None
        self._tail = whole[-self._reach :] if self._reach else ""
        return surplus

    def held(self) -> int:
        """Return how many characters at the end of the text could be the beginning of a stop string."""
        if self._include:
            return 0
        longest = min(self._reach, len(self._tail))
        for length in range(longest, 0, -1):
            end = self._tail[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0

    def _surplus(self, whole: str, old: int) -> int | None:
        """Return what `add` does, for the earliest end of a stop string beyond the first `old` characters."""
        ends: list[tuple[int, int]] = []
        for stop in self._stop:
            start = whole.find(stop, max(old - len(stop) + 1, 0))
            if start >= 0:
                ends.append((start + len(stop), start))
        if not ends:
            return None
        # The first of those that end at the same place is the request's first, as in vLLM.
        end, start = min(ends, key=lambda place: place[0])
        return len(whole) - (end if self._include else start)


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_prompt(model: TransformersModel, prompt_ids: Sequence[int]) -> list[float]:
    """Return the log probabilities of a prompt's tokens, from the second on, each given those before."""
    values: list[float] = []
    cache = None
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    last = len(prompt_ids) - 1
    for begin in range(0, last, _CHUNK):
        end = min(begin + _CHUNK, last)
        output: Any = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        values += logprobs.gather(-1, ids[0, begin + 1 : end + 1, None])[:, 0].tolist()
    return values
