"""The default tensor-parallel sizes of well-known models. A test in tests/live compares them with vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.memory.parallelism import (
    Layout,
    ModelMemory,
    Weights,
    chooses_gpus,
    copies_that_fit,
    tensor_parallel_sizes,
    why_one_copy,
)
from engines.memory.weight_files import hub_file, hub_weight_bytes, is_expert

MODELS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "fixtures" / "model_configs.json").read_bytes())
GIB = 1 << 30
MEMORY = {"24": int(22.0 * GIB), "48": int(44.4 * GIB), "80": int(79.1 * GIB), "141": int(139.8 * GIB)}
"""The memory of an L4, an L40S, an H100 and an H200, as the driver reports it."""
COUNTS = (1, 2, 4, 8)
LLAMA_8B = MODELS["Llama-3.1-8B"]


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = MODELS[name]["config"]
    return found


def default(name: str, gpus: int, memory: str) -> int:
    model = MODELS[name]
    sizes = tensor_parallel_sizes(model["config"], gpus)
    return ModelMemory(model["config"], Weights(model["weight_bytes"])).fewest(sizes, MEMORY[memory])[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_of_a_model_are_those_of_the_table(name: str) -> None:
    assert list(tensor_parallel_sizes(config(name), 8)) == MODELS[name]["sizes"]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", MODELS)
def test_the_default_of_a_model_is_that_of_the_table(name: str, memory: str) -> None:
    assert [default(name, gpus, memory) for gpus in COUNTS] == MODELS[name]["default"][memory]


def test_pipeline_stages_share_the_weights_and_the_cache() -> None:
    llama = MODELS["Llama-3.3-70B"]
    whole, halves = (
        ModelMemory(llama["config"], Weights(llama["weight_bytes"]), Layout(stages=stages)) for stages in (1, 2)
    )
    assert whole.fewest((1, 2, 4), MEMORY["80"])[0] == 4
    assert halves.fewest((1, 2, 4), MEMORY["80"])[0] == 2
    assert halves.sequence_bytes(1) == whole.sequence_bytes(1) // 2


def test_without_the_size_of_weights_or_memory_the_model_gets_all_gpus_that_it_allows() -> None:
    nothing, weights = (
        ModelMemory(config("Qwen2.5-7B"), Weights(0)),
        ModelMemory(config("Qwen2.5-7B"), Weights(15 * GIB)),
    )
    most = "the most that the model allows, since "
    assert nothing.fewest((1, 2, 4), MEMORY["80"]) == (4, most + "the size of its weights is not known")
    assert weights.fewest((1, 2, 4), 0) == (4, most + "the GPUs' memory is not known")


@pytest.mark.parametrize(("widths", "sizes"), [([1536, 512], (1, 2, 4)), ([1536, 192], (1, 2)), ([1536, 520], (1,))])
def test_each_kind_of_experts_keeps_whole_blocks(widths: list[int], sizes: tuple[int, ...]) -> None:
    heads = {"hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4}
    quantized = {"quantization_config": {"weight_block_size": [128, 128]}}
    experts = {"moe_num_experts": [64, 64], "moe_intermediate_size": widths}
    assert tensor_parallel_sizes(heads | experts | quantized, 8) == sizes


def test_a_model_that_nothing_is_known_of_may_have_any_number() -> None:
    assert tensor_parallel_sizes({}, 8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert ModelMemory({}, Weights(GIB)).fewest((1, 2), MEMORY["24"])[0] == 1


def test_a_shorter_context_needs_fewer_gpus() -> None:
    model = MODELS["Llama-3.2-3B"]
    short = ModelMemory(model["config"], Weights(model["weight_bytes"]), max_model_len=8192)
    assert short.sequence_bytes(1) == 8192 * 28 * 2 * 8 * 128 * 2
    assert short.fewest((1, 2), MEMORY["24"])[0] == 1
    assert default("Llama-3.2-3B", 2, "24") == 2


def test_the_reason_says_where_the_gpus_may_be_too_few() -> None:
    size, why = ModelMemory(config("DeepSeek-V3"), Weights(MODELS["DeepSeek-V3"]["weight_bytes"])).fewest(
        (1, 2), MEMORY["24"]
    )
    assert size == 2
    assert why == (
        "the most that the model allows, which may be too few for the weights (641.3 GiB) and a useful KV cache"
    )


@pytest.mark.parametrize(
    ("name", "tokens_in_layers"),
    [
        ("Gemma-3-1B", 4 * 32768 + 22 * 512),
        ("GPT-OSS-20B", 12 * 131072 + 12 * 128),
        ("Granite-4.0-H-Small", 4 * 131072),
        ("Qwen3-Next-80B-A3B", 12 * 262144),
    ],
)
def test_layers_with_a_window_or_a_state_keep_less_of_a_sequence(name: str, tokens_in_layers: int) -> None:
    text = config(name)
    head_size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    token = 2 * text["num_key_value_heads"] * head_size * 2
    assert ModelMemory(text, Weights(0)).sequence_bytes(1) == tokens_in_layers * token


def test_kv_heads_that_are_copied_and_latent_attention_need_no_less_on_more_gpus() -> None:
    qwen, deepseek = (ModelMemory(config(name), Weights(0)) for name in ("Qwen2.5-1.5B", "DeepSeek-V3"))
    assert qwen.sequence_bytes(1) == 2 * qwen.sequence_bytes(2) == 2 * qwen.sequence_bytes(4)
    assert deepseek.sequence_bytes(8) == deepseek.sequence_bytes(1) == 61 * 163840 * (512 + 64) * 2


def test_the_size_of_weights_on_the_hub_is_that_of_their_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def metadata(repository: str, revision: str | None) -> SimpleNamespace:
        if repository != "a/model":
            raise ConnectionError("no network")
        file = SimpleNamespace(tensors={name: SimpleNamespace(data_offsets=span) for name, span in spans.items()})
        return SimpleNamespace(files_metadata={"1.safetensors": file, "2.safetensors": file})

    spans = {"x": (0, 12), "model.layers.0.mlp.experts.3.up_proj.weight": (12, 20)}

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", metadata)
    assert hub_weight_bytes("a/model", None) == 40
    assert hub_weight_bytes("a/model", None, is_expert) == 16
    assert hub_weight_bytes("another/model", None) == 0


def test_a_file_of_the_hub_comes_from_the_cache_else_from_the_hub_else_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repository: str, name: str, revision: str | None) -> str:
        if repository != "a/model":
            raise ConnectionError("no network")
        return str(tmp_path / "downloaded" / name)

    cached: dict[str, Any] = {"cached/model": str(tmp_path / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, *_, **__: cached.get(repository))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert hub_file("cached/model", "config.json", None) == tmp_path / "config.json"
    assert hub_file("a/model", "config.json", "v1") == tmp_path / "downloaded" / "config.json"
    assert hub_file("another/model", "config.json", None) is None
    cached["a/model"] = object()  # the hub has answered that there is no such file
    assert hub_file("a/model", "config.json", None) is None


@pytest.mark.parametrize(
    ("arguments", "most_of_eight", "taken_by_one_and_two"),
    [
        ({}, 8, (1, 2)),
        ({"pipeline_parallel_size": 2}, 4, (2, 4)),
        ({"prefill_context_parallel_size": "2"}, 4, (2, 4)),
        ({"prefill_context_parallel_size": 2, "data_parallel_size": 2}, 2, (4, 8)),
        ({"data_parallel_size": 16, "data_parallel_size_local": 4}, 2, (4, 8)),
        ({"data_parallel_size": 16, "data_parallel_rank": 3}, 8, (1, 2)),
        # Two machines of eight GPUs each.
        ({"pipeline_parallel_size": 2, "nnodes": 2}, 8, (1, 2)),
        ({"pipeline_parallel_size": 2, "nnodes": "2", "data_parallel_size": 2}, 4, (2, 4)),
        ({"nnodes": 2}, 16, (1, 1)),
        ({"pipeline_parallel_size": 16}, 1, (16, 32)),
        ({"data_parallel_size": None, "nnodes": "", "pipeline_parallel_size": "two"}, 8, (1, 2)),
    ],
)
def test_all_gpus_are_counted_that_vllm_takes(
    arguments: dict[str, Any], most_of_eight: int, taken_by_one_and_two: tuple[int, int]
) -> None:
    layout = Layout.of(arguments)
    assert layout.most(8) == most_of_eight
    assert (layout.gpus(1), layout.gpus(2)) == taken_by_one_and_two


def test_replicas_share_out_the_experts_and_each_has_the_rest() -> None:
    model = MODELS["DeepSeek-V3"]
    experts = 58 * 256 * 3 * 7168 * 2048  # FP8: a byte each
    weights = Weights(model["weight_bytes"], experts)
    assert 0.9 * weights.total < experts < weights.total
    apart = Layout(replicas=8, replicas_here=8)
    assert weights.each(1, apart) == weights.total - experts + experts // 8
    assert weights.each(8, Layout()) == pytest.approx(weights.total / 8)
    b200 = 180 * 10**9
    latent = ModelMemory(model["config"], weights, apart, max_model_len=32768)
    assert latent.fits(1, b200)
    assert not ModelMemory(model["config"], Weights(weights.total), apart, max_model_len=32768).fits(1, b200)


def test_a_draft_model_takes_memory_of_the_last_stage() -> None:
    llama = MODELS["Llama-3.1-8B"]
    weights = Weights(llama["weight_bytes"], draft=50 * GIB)
    assert weights.each(2, Layout(stages=2)) == llama["weight_bytes"] // 4 + 25 * GIB
    alone, drafted = ModelMemory(llama["config"], Weights(weights.total)), ModelMemory(llama["config"], weights)
    assert alone.fewest((1, 2, 4), MEMORY["80"])[0] == 1
    size, why = drafted.fewest((1, 2, 4), MEMORY["80"])
    assert size == 2
    assert "50.0 GiB of a draft model" in why


@pytest.mark.parametrize(
    ("gpus", "per_copy", "most", "copies"),
    [(4, 1, None, 4), (4, 3, None, 1), (8, 2, 3, 3), (8, 2, 9, 4), (2, 4, None, 1), (0, 1, None, 1), (8, 1, 1, 1)],
)
def test_copies_take_whole_groups_of_gpus_and_one_always_counts(
    gpus: int, per_copy: int, most: int | None, copies: int
) -> None:
    assert copies_that_fit(gpus, per_copy, most) == copies


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"data_parallel_size": "1", "nnodes": 1, "distributed_executor_backend": "mp", "device_ids": None}, ""),
        ({"distributed_executor_backend": None, "enable_expert_parallel": False, "kv_transfer_config": None}, ""),
        ({"data_parallel_size": 2, "nnodes": 2}, "data_parallel_size"),
        ({"data_parallel_rank": 0}, "data_parallel_rank"),
        ({"nnodes": "2"}, "nnodes"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"enable_expert_parallel": "True"}, "enable_expert_parallel"),
        ({"device_ids": [1]}, "device_ids"),
        ({"kv_events_config": "{}"}, "kv_events_config"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
    ],
)
def test_arguments_of_one_copy_are_found_as_texts_and_typed(arguments: dict[str, Any], reason: str) -> None:
    assert why_one_copy(arguments) == reason


@pytest.mark.parametrize(
    ("arguments", "chooses"),
    [
        ({}, False),
        (
            {"nnodes": "1", "distributed_executor_backend": " uni", "data_parallel_backend": "mp", "device_ids": ""},
            False,
        ),
        ({"data_parallel_size": "2", "data_parallel_rank": "0", "enable_expert_parallel": "true"}, False),
        ({"nnodes": "2"}, True),
        ({"device_ids": "1"}, True),
        ({"distributed_executor_backend": "ray"}, True),
        ({"data_parallel_backend": "ray"}, True),
    ],
)
def test_vllm_or_an_argument_may_choose_the_gpus(arguments: dict[str, Any], chooses: bool) -> None:
    assert chooses_gpus(arguments) is chooses


def test_the_tokens_of_a_cache_are_what_the_weights_leave() -> None:
    """A token takes 128 KiB: 32 layers have 8 heads each, and each head has a key and a value of 128 numbers."""
    memory = ModelMemory(LLAMA_8B["config"], Weights(16 * GIB))
    assert memory.cache_tokens(1, 100 * GIB) == pytest.approx((92 - 4 - 16) * GIB / (128 << 10), abs=1)
    assert memory.cache_tokens(2, 100 * GIB) == pytest.approx((92 - 4 - 8) * GIB / (64 << 10), abs=1)
    given = ModelMemory(LLAMA_8B["config"], Weights(16 * GIB), given_cache_bytes=GIB)
    assert given.cache_tokens(1, 100 * GIB) == GIB / (128 << 10)
    assert memory.cache_tokens(1, 0) is None
    assert ModelMemory(LLAMA_8B["config"], Weights(0)).cache_tokens(1, 100 * GIB) is None
    assert ModelMemory({}, Weights(1 << 30)).cache_tokens(1, 100 * GIB) is None
    assert memory.cache_tokens(1, 10 * GIB) == 0
