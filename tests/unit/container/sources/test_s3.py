from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from container.sources.location import SourceError
from container.sources.s3 import RemoteFile, check_path, selected


@given(st.text(alphabet="ab./\\\0é", max_size=12))
def test_a_path_stays_below_its_directory_or_is_refused(text: str) -> None:
    try:
        path = check_path(text)
    except SourceError:
        return
    parts = path.split("/")
    assert not {"", ".", ".."} & set(parts)


_PATHS = ["a.safetensors", "pytorch_model.bin", "x/pytorch_model-1.bin", "x/b.safetensors", "c.json"]


@given(st.lists(st.sampled_from([*_PATHS, "original/consolidated.00.pth", "optimizer.pt"])))
def test_whatever_is_left_out_is_there_in_another_form(paths: list[str]) -> None:
    files = [RemoteFile(path, 1, "v") for path in set(paths)]
    chosen = {file.path for file in selected(files)}
    for path in set(paths) - chosen:
        folder = "" if path.startswith("original/") else path.rpartition("/")[0]
        assert any(one.endswith(".safetensors") and one.rpartition("/")[0] == folder for one in chosen)
    assert {path for path in paths if path.endswith((".json", ".safetensors"))} <= chosen


def test_files_that_may_be_further_parts_of_a_model_are_fetched() -> None:
    parts = ["sparse_linear.pt", "mask_embedding.pt", "voice.bin", "original/params.json", "original/own.pt"]
    copies = ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "original/consolidated.00.pth"]
    files = [RemoteFile(path, 1, "v") for path in ("model.safetensors", *parts, *copies)]
    assert {file.path for file in selected(files)} == {"model.safetensors", *parts}
