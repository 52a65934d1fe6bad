"""A conversation as one prompt, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handlers.contracts.family import Texts


class NoChatTemplate(Exception):
    """The model has none."""


class TemplateRefusal(Exception):
    """The template does not take these messages; the text of the exception is its reason."""


def render(
    texts: Texts,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt. `messages` have a string as `content`.

    Raises:
        NoChatTemplate: the model has none.
        TemplateRefusal: it does not take these messages.
    """
    if not texts.has_chat_template:
        raise NoChatTemplate
    try:
        return texts.chat(messages, tools, add_generation_prompt)
    except Exception as error:  # a template is the model's own code, and says in any way that it cannot take them
        raise TemplateRefusal(str(error) or type(error).__name__) from error
