"""What goes wrong with a model that is somewhere else."""

from __future__ import annotations


class SourceError(Exception):
    """A model cannot be fetched; the message names what was given, and where and why it failed."""


class FetchTimeout(SourceError):
    """The download did not end in the time that it was given; what it has is kept."""


class FetchStopped(SourceError):
    """The download was told to stop; what it has is kept."""
