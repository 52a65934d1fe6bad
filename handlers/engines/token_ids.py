"""Token ids that come with a request."""

from __future__ import annotations

from collections.abc import Collection

from handlers.errors import InvalidParameter


def check_token_ids(name: str, token_ids: Collection[int], limit: int, vocabulary_size: int) -> None:
    """Refuse too many of them, and those that no token has.

    Raises:
        InvalidParameter: naming the parameter.
    """
    if len(token_ids) > limit:
        raise InvalidParameter(name, f"must hold at most {limit} token ids, got {len(token_ids)}")
    # An id beyond the vocabulary would be an index beyond the logits in the engine's process.
    largest = max(token_ids, default=0)
    if largest >= vocabulary_size:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({vocabulary_size}), got {largest}"
        )
