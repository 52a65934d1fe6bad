"""AWS's partitions: what stands second in a region's ARNs, and what its host names end with."""

from __future__ import annotations

# From botocore's endpoints.json, by what the names of their regions begin with.
_OTHERS = (
    ("cn-", "aws-cn", "amazonaws.com.cn"),
    ("us-gov-", "aws-us-gov", "amazonaws.com"),
    ("eusc-", "aws-eusc", "amazonaws.eu"),
    ("us-iso-", "aws-iso", "c2s.ic.gov"),
    ("us-isob-", "aws-iso-b", "sc2s.sgov.gov"),
    ("eu-isoe-", "aws-iso-e", "cloud.adc-e.uk"),
    ("us-isof-", "aws-iso-f", "csp.hci.ic.gov"),
)
_COMMERCIAL = ("aws", "amazonaws.com")

DOMAINS = (_COMMERCIAL[1], *sorted({domain for _, _, domain in _OTHERS} - {_COMMERCIAL[1]}))
"""Of all partitions."""


def partition(region: str) -> str:
    """The ARN's second field for a region."""
    return _of(region)[0]


def domain(region: str) -> str:
    """What the host names of a region's services end with."""
    return _of(region)[1]


def _of(region: str) -> tuple[str, str]:
    return next(((name, suffix) for prefix, name, suffix in _OTHERS if region.startswith(prefix)), _COMMERCIAL)
