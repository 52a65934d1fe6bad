"""Answers that show tokens: a JSON document, or a record for each token. LMI and TGI use them.

A `TokenForm` describes a contract's JSON. Its tuples list the members of each object in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from json.encoder import encode_basestring as quote
from math import isfinite

import msgspec

from engines.request import DEADLINE, FinishReason, GeneratedSequence, Token, TokenDelta
from handlers.contract import JSON, Answer

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
_NO_TOKEN = Token(-1, "")


class ShownSequence(GeneratedSequence):
    """A sequence, plus the values that the engine does not supply."""

    prompt: str = ""
    seed: int | None = None
    others: Sequence[str] = ()  # The objects of `best_of_sequences`. If empty, that member is left out.


class TokenForm(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of one contract, and the members that a request asks for."""

    token: tuple[str, str, str] = ("", "", "")  # The JSON before the id, before the text, before the logprob.
    ends: tuple[str, str] = ("}", "}")  # The end of a normal token's object, and the end of a special token's object.
    prefill: TokenForm | None = None  # The form of the prompt's tokens, if it differs from this form.
    number: Callable[[float], str] = repr  # Writes a finite log probability. Other values become null.
    special_texts: Mapping[int, str] = {}  # Texts of special tokens, keyed by id. `generated_text` omits them.
    comma: str = ", "
    colon: str = ": "
    # Whether every record of a stream has `generated_text` and `details`. Before the last record, both are null. In the
    # last record, `details` is null if the field `details` below is empty.
    nulls: bool = False
    details: tuple[str, ...] = ()  # The members of `details`. If empty, the answer has no details.
    others: tuple[str, ...] = ()  # The members of each object in `best_of_sequences`.
    full_text: bool = False  # Whether the text begins with the prompt.

    def sequence(self, prompt: str, seed: int | None = None) -> ShownSequence:
        return ShownSequence(text=[prompt] if self.full_text else [], prompt=prompt, seed=seed)

    def token_of(self, token: Token) -> str:
        """Return a token's object. Hot path: this runs for each token of each stream."""
        text, logprob, special = token.text, token.logprob, token.special
        if special and not text:
            text = self.special_texts.get(token.id, "")
        before_id, before_text, before_logprob = self.token
        number = "null" if logprob is None or not isfinite(logprob) else self.number(logprob)
        return f"{before_id}{token.id}{before_text}{quote(text)}{before_logprob}{number}{self.ends[special]}"

    def array(self, values: Iterable[str]) -> str:
        return f"[{self.comma.join(values)}]"

    def tokens(self, tokens: Iterable[Token]) -> str:
        return self.array(map(self.token_of, tokens))

    def object(self, names: Iterable[str], sequence: ShownSequence) -> str:
        """Return an object with these members of a sequence."""
        values = [(name, _VALUES[name](self, sequence)) for name in names]
        if sequence.ended_at_deadline:
            values.append(("stop_reason", f'"{DEADLINE}"'))
        return "{" + self.comma.join([f'"{name}"{self.colon}{value}' for name, value in values if value]) + "}"

    def texts(self, sequence: ShownSequence, *, nulls: bool = False) -> str:
        """Return the members `generated_text` and `details`. Without details, `details` is null or absent."""
        text = f'"generated_text"{self.colon}{quote("".join(sequence.text))}'
        if not (self.details or nulls):
            return text
        details = self.object(self.details, sequence) if self.details else "null"
        return f'{text}{self.comma}"details"{self.colon}{details}'


_REASONS = {None: "null"} | {reason: quote(name) for reason, name in FINISH_REASONS.items()}
# For each member: the function that returns the JSON of its value. If the JSON is empty, the member is left out.
_VALUES: Mapping[str, Callable[[TokenForm, ShownSequence], str]] = {
    "generated_text": lambda form, sequence: quote("".join(sequence.text)),
    "finish_reason": lambda form, sequence: _REASONS[sequence.finish_reason],
    "generated_tokens": lambda form, sequence: str(sequence.count),
    "input_length": lambda form, sequence: str(sequence.prompt_token_count),
    "inputs": lambda form, sequence: quote(sequence.prompt),
    "seed": lambda form, sequence: "null" if sequence.seed is None else str(sequence.seed),
    "prefill": lambda form, sequence: (form.prefill or form).tokens(sequence.prompt_tokens),
    "tokens": lambda form, sequence: form.tokens(sequence.tokens),
    "top_tokens": lambda form, sequence: form.array([form.tokens(token.top) for token in sequence.tokens]),
    "best_of_sequences": lambda form, sequence: form.array(sequence.others) if sequence.others else "",
}


def without(names: Iterable[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return the names of an object's members, without the names in `left_out`."""
    return tuple([name for name in names if name not in left_out])


class TokenDocument(Answer):
    """A document for each prompt. The documents are sent when all prompts have finished.

    A document has the text of the prompt's best sequence. Its `details` have the other sequences.
    """

    content_type = JSON
    # The text before the first document's members, between the members of two documents, and after the last document's
    # members.
    around = ("{", "", "}")

    def __init__(self, form: TokenForm, prompts: Sequence[str], seeds: Sequence[int | None] = ()) -> None:
        self._form, self._prompts, self._seeds = form, prompts, seeds
        # For each prompt: its sequences, keyed by rank.
        self._sequences: list[dict[int, ShownSequence]] = [{} for _ in prompts]
        self._open = len(prompts)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        sequences = self._sequences[prompt]
        if (sequence := sequences.get(delta.sequence)) is None:
            seed = self._seeds[prompt] if self._seeds else None
            sequence = sequences[delta.sequence] = self._form.sequence(self._prompts[prompt], seed)
        sequence.add(delta)
        self._open -= delta.last
        if self._open:
            return b""
        before, between, after = self.around
        return f"{before}{between.join(self._documents())}{after}".encode()

    def _documents(self) -> list[str]:
        """Return the members of each document."""
        return [self._document(*map(ranked.__getitem__, sorted(ranked))) for ranked in self._sequences]

    def _document(self, best: ShownSequence, *others: ShownSequence) -> str:
        if others and self._form.details:
            best.others = [self._form.object(self._form.others, other) for other in others]
        return self._form.texts(best)


class TokenStream(Answer):
    """A record for each token of one sequence. The last record has the whole text."""

    head: str  # The text before each token.
    after: str  # The text after each record.
    done = ""  # The text at the end of the stream.

    def __init__(self, form: TokenForm, prompt: str, seed: int | None = None) -> None:
        self._form, self._sequence = form, form.sequence(prompt, seed)
        nulls = f'{form.comma}"generated_text"{form.colon}null{form.comma}"details"{form.colon}null'
        self._tail = f"{nulls if form.nulls else ''}}}{self.after}"
        self._between = self._tail + self.head
        # If True, all deltas are kept, because the last record shows their data.
        self._keeps = "prefill" in form.details or "top_tokens" in form.details

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return a record for each token of the delta. Hot path: this runs for each token of each stream."""
        tokens, end = delta.tokens, self._tail
        if delta.last or self._keeps:
            self._sequence.add(delta)
        else:
            self._sequence.text.append(delta.text)
        if delta.last:
            tokens, end = tokens or [_NO_TOKEN], self._end()
        elif not tokens:
            return b""
        token_of = self._form.token_of
        records = token_of(tokens[0]) if len(tokens) == 1 else self._between.join(map(token_of, tokens))
        return f"{self.head}{records}{end}".encode()

    def _end(self) -> str:
        """Return the text after the last token."""
        form = self._form
        if self._sequence.ended_at_deadline and not form.details:  # Nothing else would show the deadline.
            form = msgspec.structs.replace(form, details=("finish_reason", "generated_tokens"))
        return f"{form.comma}{form.texts(self._sequence, nulls=form.nulls)}}}{self.after}{self.done}"
