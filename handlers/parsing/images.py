"""Images that requests name by URL. OpenAI's chats do not need this module: vLLM loads their images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

DATA_URL = "data:image/png;base64,"  # This type has no effect, because the image itself shows its type.


class ImageLoader(Protocol):
    """Loads images within the limits of the model's settings."""

    def load(self, urls: Sequence[str]) -> AbstractAsyncContextManager[Sequence[Any]]:
        """Load the images of a request. The images stay in memory until the block ends.

        Raises:
            UnusableImage: An image cannot be fetched, is broken, or exceeds a limit.
            InvalidRequest: The request has more images than the model accepts.
            Overloaded: The images of other requests fill the memory.
        """
