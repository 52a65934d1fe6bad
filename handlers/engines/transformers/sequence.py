"""One sequence being generated: its tokens' texts, its deltas and its end, with vLLM's semantics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.decoders import DecodeStream

from handlers.engines.texts import decoding_context, fast_tokenizer, split_text
from handlers.engines.transformers.model import TransformersModel
from handlers.engines.transformers.sampling import Choice
from handlers.request import FinishReason, GenerationRequest, Token, TokenDelta

_INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` begins to say that its stream has lost its place."""
_CONTEXT = 8
"""Tokens that a slow tokenizer needs to see in front of the next one."""


class TokenTexts:
    """What each token adds to the text: empty while a character is incomplete."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._fast: Any = fast_tokenizer(tokenizer)
        context = list(decoding_context(tokenizer, prompt_ids, skip_special))
        if self._fast is not None:
            self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special)
        self._window = context
        self._known = len(self._window)
        self._hidden = frozenset(tokenizer.all_special_ids) if skip_special else frozenset()
        # Only where special tokens are shown can there be blanks between them to leave out.
        self._joined: Mapping[int, str] = {} if spaces or skip_special else _added_tokens(tokenizer)
        self._after_added = False

    def add(self, token_id: int) -> str:
        """The text of the next token."""
        text = self._step_fast(token_id) if self._fast is not None else self._step_slow(token_id)
        if not self._joined:
            return text
        added = self._joined.get(token_id)
        joined = added is not None and self._after_added
        self._after_added = added is not None
        return added if joined and added is not None else text

    def _step_fast(self, token_id: int) -> str:
        try:
            return self._stream.step(self._fast, token_id) or ""
        except Exception as error:
            # Some tokenizers can write invalid UTF-8, on which the stream gives up.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._fast, token_id) or ""

    def _step_slow(self, token_id: int) -> str:
        """Decode with the tokens before, since a token's text may depend on them."""
        if token_id in self._hidden:
            return ""  # it has no text, and a row of such tokens would make the window grow and grow
        self._window.append(token_id)
        before, whole = self._decode(self._window[: self._known]), self._decode(self._window)
        if whole.endswith("\ufffd") or len(whole) <= len(before):
            return ""
        self._window = self._window[max(self._known - _CONTEXT, 0) :]
        self._known = len(self._window)
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text


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
        """How many characters at the end of the text could be the beginning of a stop string."""
        if self._include:
            return 0
        longest = min(self._reach, len(self._tail))
        for length in range(longest, 0, -1):
            end = self._tail[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0

    def _surplus(self, whole: str, old: int) -> int | None:
        """From the earliest end of a stop string that lies beyond the first `old` characters."""
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


def _added_tokens(tokenizer: Any) -> Mapping[int, str]:
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}


_CHUNK_ON_CPU, _CHUNK_ON_GPU = 128, 512
"""Tokens in one pass: the logits of all tokens of a long prompt would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What the model says of a prompt's tokens, from the second on."""

    values: list[float] = field(default_factory=list)
    """The log probability of each, given those before."""
    ranks: list[int] = field(default_factory=list)
    """The place of each by probability, from 1; empty unless wanted."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_prompt(model: TransformersModel, prompt_ids: Sequence[int], want_ranks: bool) -> PromptReading:
    """Pass over the prompt in chunks; blocks for as long as the model takes."""
    reading, cache = PromptReading(), None
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    chunk = _CHUNK_ON_CPU if model.device.type == "cpu" else _CHUNK_ON_GPU
    last = len(prompt_ids) - 1
    for begin in range(0, last, chunk):
        end = min(begin + chunk, last)
        output: Any = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        own = logprobs.gather(-1, ids[0, begin + 1 : end + 1, None])
        reading.values.extend(own.squeeze(-1).tolist())
        if want_ranks:
            reading.ranks.extend(((logprobs > own).sum(dim=-1) + 1).tolist())
    return reading


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
        self.token_count = 0
        self.finish_reason: FinishReason | None = None
        self.prompt_reading: PromptReading | None = None
        """Done; to be set before the first token where the request wants the prompt's tokens."""
        self._cumulative_logprob: float | None = None
        self._texts = TokenTexts(model.tokenizer, prompt_ids, s.skip_special_tokens, s.spaces_between_special_tokens)
        self._stop = StopStrings(s.stop, s.include_stop_str_in_output)
        self._held = ""
        self._pending: list[Token] = []
        self._free = 0  # characters that were let go and no token has taken yet
        self._prompt_tokens_due = request.want_prompt_tokens

    def add(self, choice: Choice) -> TokenDelta | None:
        """Take the next token; returns what there is to tell, if anything.

        The last delta has a `finish_reason`, and `last` set as for a request of a single sequence.
        """
        self.token_count += 1
        if choice.logprob is not None:
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + choice.logprob
        self.finish_reason = self._reason(choice.token_id)
        piece = self._piece(choice.token_id)
        self._held += piece
        if self._request.want_tokens:
            self._pending.append(self._token(choice, piece))
        surplus = self._stop.add(piece, count=self.token_count > self._request.sampling.min_tokens)
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
        return FinishReason.LENGTH if self.token_count >= self.limit else None

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
        return Token(choice.token_id, piece, choice.logprob, choice.token_id in special, top, choice.rank)

    def _delta(self) -> TokenDelta | None:
        finished = self.finish_reason is not None
        text = self._let_go(finished)
        tokens = self._release(len(text), finished)
        if not (text or tokens or finished or self._prompt_tokens_due):
            return None
        delta = TokenDelta(text, tokens, self._sequence, None, len(self._prompt_ids), self.token_count)
        delta.cumulative_logprob = self._cumulative_logprob
        if self._prompt_tokens_due:
            self._prompt_tokens_due = False
            delta.prompt_tokens = self._prompt_tokens()
        if finished:
            delta.finish_reason = self.finish_reason
            delta.last = True
        return delta

    def _let_go(self, finished: bool) -> str:
        keep = 0 if finished else self._stop.held()
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _release(self, characters: int, finished: bool) -> list[Token]:
        """Hand over the tokens whose text has been let go; at the end all, without what belongs to a stop string."""
        pending = self._pending
        self._free += characters
        released = 0
        for token in pending:
            if len(token.text) > self._free:
                if not finished:
                    break
                token.text = token.text[: self._free]
            self._free -= len(token.text)
            released += 1
        self._pending = pending[released:]
        return pending[:released]

    def _prompt_tokens(self) -> list[Token]:
        tokens = split_text(self._model.tokenizer, self._prompt_ids, self._model.special_ids, skip_special_tokens=False)
        if self.prompt_reading is not None:
            for token, value in zip(tokens[1:], self.prompt_reading.values, strict=False):
                token.logprob = value
            for token, rank in zip(tokens[1:], self.prompt_reading.ranks, strict=False):
                token.rank = rank
        return tokens
