"""`s3://bucket/prefix`: a folder of objects, taken for a directory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from container.sources.source_error import SourceError

_URL = re.compile(r"s3://([^/]*)/*(.*)", re.IGNORECASE | re.DOTALL)
# Names of buckets, old ones in capitals included, and access points by their ARN.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}|arn:[a-z0-9-]+:s3[a-z0-9:./-]+", re.ASCII)
_LONGEST_KEY = 1024


@dataclass(frozen=True, slots=True)
class S3Url:
    """A folder of a bucket."""

    bucket: str
    prefix: str
    """Empty for the whole bucket, else without slashes at its ends."""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}/" if self.prefix else f"s3://{self.bucket}/"

    @property
    def name(self) -> str:
        """The last part, which names the model (contracts/lmi.md 2.6)."""
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def key_prefix(self) -> str:
        """What all keys in it begin with."""
        return f"{self.prefix}/" if self.prefix else ""

    @classmethod
    def parse(cls, text: str) -> S3Url:
        """The folder that `text` names, with or without a slash at its end.

        Raises:
            SourceError: it is no such URL, or no bucket can be called so.
        """
        found = _URL.fullmatch(text.strip())
        if found is None:
            raise SourceError("allowed: s3://bucket/prefix/")
        bucket, prefix = found[1], found[2].strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise SourceError(f'"{_printable(bucket)}" cannot be the name of a bucket; allowed: s3://bucket/prefix/')
        if not prefix.isprintable() or len(prefix.encode("utf-8", "replace")) > _LONGEST_KEY:
            raise SourceError(f"the prefix must be printable text of at most {_LONGEST_KEY} bytes")
        return cls(bucket, prefix)


def is_s3(text: str) -> bool:
    """Whether `text` is meant to be on S3."""
    return text.strip()[:5].lower() == "s3://"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
