"""LMI's chats and the answers of the asynchronous mode have the same bytes, in whichever way they are written.

One way writes them from the engine's deltas. The other converts the bytes of vLLM's serving classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import EngineDead, EngineFault, GenerationFailed, InvalidParameter, Overloaded, RequestError
from engines.request import FinishReason, Token, TokenDelta
from handlers.contract import Answer, Call, Reply, ReplyWriter
from handlers.lmi.chat_answers import AsyncForm, LmiChatForm
from handlers.openai.answer import VLLM_FORM, AnswerForm, AnswerOptions
from tests.stand_ins.collected_reply import CollectedReply

FORMS = [LmiChatForm(), LmiChatForm(sse=True, overload_status=429), AsyncForm(), AsyncForm(429, 424)]
ERRORS = [
    GenerationFailed('it "broke" é \ud800'),
    EngineDead(),
    EngineFault(),
    Overloaded("full", 503),
    InvalidParameter("n", "<1>"),
]
CALL = Call(body=b'{"stop_token_ids": [7]}', request_id="r")


@dataclass(frozen=True, slots=True)
class Script:
    """The options of a caller, and the deltas or the error of an engine."""

    options: AnswerOptions
    stream: bool
    deltas: list[TokenDelta]
    error: RequestError | None = None


def send(answer: Answer, writer: ReplyWriter, script: Script) -> None:
    """Write an answer as `RunningCall` writes it."""
    begun = False
    for delta in script.deltas:
        data = answer.feed(0, delta)
        if delta.last and begun:
            writer.end(data)
        elif delta.last:
            writer.reply(Reply(200, answer.content_type, data))
        elif data:
            if not begun:
                begun = True
                writer.start(200, answer.content_type)
            writer.write(data)
    if script.error is not None:
        if begun:
            writer.end(answer.fail_midway(script.error))
        else:
            writer.reply(answer.fail(script.error))


def result(writer: CollectedReply) -> tuple[int, str, bytes]:
    assert writer.finished
    whole = writer.whole
    if whole is None:
        return writer.status, writer.content_type, writer.body
    return whole.status, whole.content_type, whole.body


def both(form: AnswerForm, script: Script, *, chat: bool = True) -> list[tuple[int, str, bytes]]:
    """Return the reply that is written from deltas, and the reply that is converted from vLLM's bytes."""
    results = []
    for own in (True, False):
        client = CollectedReply()
        writer = client if own else form.of_vllm(client, CALL)
        made = form if own else VLLM_FORM
        if chat:
            answer = made.chat(script.options, stream=script.stream)
        else:
            answer = made.completion(script.options, 1, stream=script.stream)
        send(answer, writer, script)
        results.append(result(client))
    return results


texts = st.one_of(
    st.sampled_from(["", " a", "é", '"\n\u2028\x00', "</b>", "data: ", "\n\n", "🙂"]), st.text(max_size=4)
)
numbers = st.one_of(st.floats(-1e5, 0), st.just(float("-inf")), st.sampled_from([-0.00002, -1e-9, -0.0, -1234567.0]))


@st.composite
def token(draw: Any, top: int) -> Token:
    others = draw(st.lists(st.builds(Token, st.integers(0, 3), texts, numbers), max_size=3)) if top else []
    return Token(draw(st.integers(0, 3)), draw(texts), draw(numbers), False, tuple(others))


@st.composite
def scripts(draw: Any) -> Script:
    sequences, logprobs = draw(st.integers(1, 3)), draw(st.booleans())
    usage = draw(st.booleans())
    options = AnswerOptions(
        id=draw(st.sampled_from(["chatcmpl-1", 'a"é'])),
        created=7,
        model="m",
        fingerprint=draw(st.sampled_from([None, "fp"])),
        role="assistant",
        sequences=sequences,
        logprobs=logprobs,
        top=draw(st.integers(0, 2)) if logprobs else 0,
        usage=usage,
        running_usage=usage and draw(st.booleans()),
        stop_token_ids=(7,),
    )
    counts, deltas = [0] * sequences, []

    def step(sequence: int, tokens: int, **fields: Any) -> TokenDelta:
        counts[sequence] += tokens
        told = [draw(token(options.top)) for _ in range(tokens)] if logprobs else []
        text = draw(texts) if counts[sequence] else ""
        return TokenDelta(text, told, sequence, prompt_token_count=3, token_count=counts[sequence], **fields)

    for _ in range(draw(st.integers(0, 8))):
        deltas.append(step(draw(st.integers(0, sequences - 1)), draw(st.integers(1, 2))))
    stream = draw(st.booleans())
    if draw(st.booleans()):
        return Script(options, stream, deltas, draw(st.sampled_from(ERRORS)))
    for place, sequence in enumerate(draw(st.permutations(range(sequences)))):
        reason = draw(st.sampled_from(list(FinishReason)))
        stop = draw(st.sampled_from([None, "###", 7, 2])) if reason is FinishReason.STOP else None
        last = place == sequences - 1
        deltas.append(step(sequence, draw(st.integers(0, 1)), finish_reason=reason, stop_reason=stop, last=last))
    return Script(options, stream, deltas)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_from_deltas_has_the_bytes_of_a_converted_answer(form: AnswerForm, chat: bool) -> None:
    if not chat and isinstance(form, LmiChatForm):
        return  # For the rolling batch, vLLM's serving classes write the completions.

    @given(scripts())
    def same(script: Script) -> None:
        own, converted = both(form, script, chat=chat)
        assert own == converted

    same()
