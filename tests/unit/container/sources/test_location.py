from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.sources.location import S3Url, SourceError, is_s3


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("s3://bucket/llama", "s3://bucket/llama/", "llama"),
        ("s3://bucket/a/llama/", "s3://bucket/a/llama/", "llama"),
        (" S3://bucket ", "s3://bucket/", "bucket"),
        ("s3://bucket//a", "s3://bucket/a/", "a"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/x",
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/x/",
            "x",
        ),
    ],
)
def test_a_folder_has_one_name(text: str, url: str, name: str) -> None:
    parsed = S3Url.parse(text)
    assert (str(parsed), parsed.name) == (url, name)


@pytest.mark.parametrize("text", ["s3://", "s3:///a", "s3://b/\x00", "http://a/b", "s3:/a/b"])
def test_what_names_no_folder_is_refused(text: str) -> None:
    with pytest.raises(SourceError):
        S3Url.parse(text)


@given(st.text())
def test_any_text_is_a_folder_or_refused(text: str) -> None:
    try:
        url = S3Url.parse("s3://" + text)
    except SourceError:
        return
    assert is_s3(str(url))
    assert S3Url.parse(str(url)) == url
    assert "/" not in url.name
    assert url.name
