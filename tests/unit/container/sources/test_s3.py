from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.sources.location import S3Url, SourceError, is_s3
from container.sources.s3 import RemoteFile, check_path, selected


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


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///a", "s3://a b/c", "s3://b/\x00", "http://a/b", "s3:/a/b", "s3://../a"]
)
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


@given(st.text(alphabet="ab./\\\0é", max_size=12))
def test_a_path_stays_below_its_directory_or_is_refused(text: str) -> None:
    try:
        path = check_path(text)
    except SourceError:
        return
    parts = path.split("/")
    assert not {"", ".", ".."} & set(parts)


@given(st.lists(st.sampled_from(["a.safetensors", "a.bin", "x/a.bin", "x/b.safetensors", "c.json", "original/p.pth"])))
def test_whatever_is_left_out_is_there_in_another_form(paths: list[str]) -> None:
    files = [RemoteFile(path, 1, "v") for path in set(paths)]
    chosen = {file.path for file in selected(files)}
    for path in set(paths) - chosen:
        folder = "" if path.startswith("original/") else path.rpartition("/")[0]
        assert any(one.endswith(".safetensors") and one.rpartition("/")[0] == folder for one in chosen)
    assert {path for path in paths if path.endswith((".json", ".safetensors"))} <= chosen
