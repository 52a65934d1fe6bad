"""Images in TGI's prompts: Markdown without a text, `![](URL)`. Source: TGI's router, `src/validation.rs`."""

from __future__ import annotations

import re
from collections.abc import Callable

from engines.errors import SHOWN, UnusableImage

_IMAGE = re.compile(r"!\[\]\(([^)]*)\)")
_SCHEMES = ("http://", "https://", "data:")


def with_marks(inputs: str, mark: Callable[[int], str]) -> tuple[str, tuple[str, ...]]:
    """Replace each image in a prompt with the model's image placeholder. Return the prompt and the images' URLs.

    Args:
        inputs: The prompt with Markdown.
        mark: Returns the placeholder of an image. Its argument is the image's number, starting at 1.

    Raises:
        UnusableImage: An image's URL is not http, https or data.
    """
    urls: list[str] = []

    def marked(found: re.Match[str]) -> str:
        url = found[1]
        if not url.startswith(_SCHEMES):
            raise UnusableImage("content", f"expected ![](URL) with http, https or data, got {found[0][:SHOWN]}")
        urls.append(url)
        return mark(len(urls))

    end = inputs.rfind(")") + 1  # After the last `)`, each `![](` would cost a search up to the end of the text.
    return _IMAGE.sub(marked, inputs[:end]) + inputs[end:], tuple(urls)
