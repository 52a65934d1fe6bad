"""Images that a contract's requests name by URLs. OpenAI's chats do not need this: vLLM's front end loads theirs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

DATA_URL = "data:image/png;base64,"  # The type does not matter: the image itself tells it.


class ImageLoader(Protocol):
    """Loads images within the limits of the model's settings."""

    def load(self, urls: Sequence[str]) -> AbstractAsyncContextManager[Sequence[Any]]:
        """Load the images of a request. They are in memory until the block ends.

        Raises:
            UnusableImage: One of them cannot be fetched, is broken, or is beyond a limit.
            InvalidRequest: There are more than the model takes.
            Overloaded: The images of other requests fill the memory.
        """
