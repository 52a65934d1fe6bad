from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from handlers.openai.vllm.body_faults import body_fault


class Text(BaseModel):
    type: Literal["text"]
    text: str


class Image(BaseModel):
    type: Literal["image"]
    url: str


class Message(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant"]
    content: str | list[Text | Image]


class Call(BaseModel):
    type: Literal["call"]
    name: str
    arguments: str


class Body(BaseModel):
    model: str
    input: str | list[Message | Call]
    most: int = 1

    @field_validator("most")
    @classmethod
    def check(cls, most: int) -> int:
        if most < 1:
            raise ValueError("must be positive")
        return most


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"input": [{"type": "foo"}]}, "input[0].type", ("foo", "message", "call")),
        ({"input": [{"role": "user", "content": "a"}, {"type": "foo"}]}, "input[1].type", ("foo",)),
        ({"input": [{"type": "call", "name": "f"}]}, "input[0].arguments", ("required",)),
        ({"input": [{"type": "call", "name": 1, "arguments": ""}]}, "input[0].name", ("string",)),
        ({"input": [{"role": "user"}]}, "input[0].content", ("required",)),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role", ("user", "assistant")),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", ("x", "text", "image")),
        ({"input": [{"role": "user", "content": [{"type": "image"}]}]}, "input[0].content[0].url", ("required",)),
        ({"input": [5]}, "input[0]", ("dictionary",)),
        ({"most": "x"}, "most", ("integer",)),
        ({"most": 0}, "most", ("must be positive",)),
        ({"model": None}, "model", ("string",)),
    ],
)
def test_the_wrong_field_is_named(fields: dict[str, Any], path: str, words: tuple[str, ...]) -> None:
    body = {"model": "m", "input": "a"} | fields
    with pytest.raises(ValidationError) as refused:
        Body.model_validate(body)
    fault = body_fault([{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()], body)
    assert fault.indexed == path
    assert fault.dotted == path.replace("[", ".").replace("]", "")
    assert all(word in fault.message for word in words)
    assert len(fault.message) < 200


@pytest.mark.parametrize(
    "errors",
    [
        [],
        ["Unsupported Media Type"],
        [{"type": "json_invalid", "loc": ("body", 1), "msg": "JSON decode error", "ctx": {"error": "no value"}}],
        [{"type": "model_attributes_type", "loc": ("body",), "msg": "Input should be a valid dictionary"}],
    ],
)
def test_the_fault_may_be_of_the_whole_body(errors: list[Any]) -> None:
    fault = body_fault(errors, [])
    assert (fault.path, fault.indexed) == ((), "")
    assert fault.message
