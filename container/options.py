"""The model's settings that Slipway knows: names, what is allowed, what is served.

Names, aliases and defaults are LMI's (contracts/lmi.md 2.7 to 2.14). An `option.<name>` that is not here goes to the
engine unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from container.handler_options import ENTRY_POINT
from container.handler_options import OPTIONS as HANDLER_OPTIONS
from container.leftovers import LEFTOVERS
from container.option import Option
from container.option_parsers import (
    BOOLEAN,
    DTYPE,
    FORMATTER,
    MILLISECONDS,
    NAMES,
    SECONDS,
    STRINGS,
    TEXT,
    Parser,
    Scalar,
    choice,
    integer,
    integer_or,
)

PREFIX = "option."
_ENGINES = ("auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable")


def _refused(key: str, parser: Parser, serves: tuple[Scalar, ...], meaning: str, advice: str) -> Option:
    return Option(key=key, parser=parser, serves=frozenset(serves), meaning=meaning, advice=advice)


SERVED = (
    Option(
        key="option.model_id",
        parser=TEXT,
        field="model_id",
        variables=("HF_MODEL_ID",),
        meaning="Hub id, `s3://bucket/prefix/`, or a directory; a relative one is looked for below the model directory",
    ),
    Option(key="option.revision", parser=TEXT, field="revision", meaning="Branch, tag or commit on the hub"),
    Option(
        key="option.trust_remote_code",
        parser=BOOLEAN,
        default="false",
        field="trust_remote_code",
        meaning="Run Python code that comes with the model",
    ),
    Option(
        key="option.rolling_batch",
        parser=choice({name: name for name in _ENGINES} | {"tnx": "vllm"}),
        default="auto",
        field="rolling_batch",
        remark="it runs on vLLM",
        quiet=frozenset(_ENGINES),
        meaning="The engine: `vllm`; `auto` is vLLM, or dynamic batch where vLLM is not installed; `lmi-dist`, "
        "`trtllm` and `scheduler` are vLLM with those backends' parameters, `scheduler` also with transformers' code "
        "of the model; `disable` is dynamic batch",
    ),
    Option(
        key="batch_size",
        parser=integer(1, 100_000),
        default="1",
        field="batch_size",
        aliases=("max_dynamic_batch_size", "option.batch_size"),
        first_counts=True,
        meaning="Prompts of a dynamic batch; above 1 means `option.rolling_batch=disable`. With a custom handler: "
        "calls that it gets together",
    ),
    Option(
        key="max_batch_delay",
        parser=MILLISECONDS,
        default="100",
        field="max_batch_delay",
        meaning="Milliseconds that the first of a dynamic batch waits for others",
    ),
    Option(
        key="option.enable_streaming",
        parser=choice(("false", "true", "huggingface")),
        default="false",
        field="enable_streaming",
        meaning="Stream the answers of the dynamic batch",
    ),
    Option(
        key="option.max_rolling_batch_size",
        parser=integer(1, 1_000_000),
        field="max_rolling_batch_size",
        aliases=("option.max_num_seqs",),
        meaning="Sequences that run together; without it, vLLM's own default for the device",
    ),
    Option(
        key="option.stop_sequence",
        parser=STRINGS,
        field="stop_sequence",
        meaning="Stop strings of every request of the dynamic batch",
    ),
    Option(
        key="option.output_formatter",
        parser=FORMATTER,
        field="output_formatter",
        meaning="Format of answers: `json`, `jsonlines`, `sse`, or a function of the model's `model.py`; without it, "
        "the request decides",
    ),
    Option(
        key="option.tgi_compat",
        parser=BOOLEAN,
        default="false",
        field="tgi_compat",
        meaning="Answer `inputs` with the field names of Text Generation Inference",
    ),
    Option(
        key="option.chat_format",
        parser=choice(("lmi", "openai")),
        default="lmi",
        field="chat_format",
        meaning="How `/invocations` answers `messages`: `lmi` as LMI's rolling batch does, `openai` as vLLM does",
    ),
    Option(
        key="option.served_model_name",
        parser=NAMES,
        field="served_model_name",
        meaning="What OpenAI's clients call the model, several names with commas; without it, the model's name",
    ),
    Option(
        key="option.do_sample_inferred",
        parser=BOOLEAN,
        default="true",
        field="do_sample_inferred",
        meaning="Sampling parameters switch sampling on unless `do_sample` is given",
    ),
    Option(
        key="option.token_logprobs",
        parser=BOOLEAN,
        default="true",
        field="token_logprobs",
        meaning="Compute `log_prob` for each token; false: it is null, and generation is faster",
    ),
    Option(
        key="option.strict_parameters",
        parser=BOOLEAN,
        default="false",
        field="strict_parameters",
        meaning="Refuse unknown generation parameters",
    ),
    Option(
        key="option.max_prompt_tokens",
        parser=integer(1),
        field="max_prompt_tokens",
        meaning="Tokens of the longest prompt that is taken; without it, the model's context alone limits it",
    ),
    Option(
        key="option.max_stop_sequences",
        parser=integer(0, 1024),
        default="4",
        field="max_stop_sequences",
        meaning="Stop sequences of a request on TGI's routes",
    ),
    Option(
        key="option.max_best_of",
        parser=integer(1, 64),
        default="2",
        field="max_best_of",
        meaning="The largest `best_of` on TGI's routes",
    ),
    Option(
        key="option.enable_lora",
        parser=BOOLEAN,
        default="false",
        field="enable_lora",
        meaning="Serve LoRA adapters, on vLLM or by a custom handler; `option.max_loras` (4 without it), "
        "`option.max_lora_rank`, `option.max_cpu_loras`, ... are vLLM's",
    ),
    Option(
        key="option.dtype",
        parser=DTYPE,
        default="auto",
        field="dtype",
        meaning="Type of weights and activations; int8 is not a type here: use `option.quantize`",
    ),
    Option(
        key="option.tensor_parallel_degree",
        parser=integer_or("max", 1),
        field="tensor_parallel_degree",
        aliases=("option.tensor_parallel_size",),
        variables=("TENSOR_PARALLEL_DEGREE",),
        meaning="GPUs that share each layer; `max`: as many as the model allows; without it vLLM takes the fewest that "
        "hold the model",
    ),
    Option(
        key="load_on_devices",
        parser=TEXT,
        field="devices",
        meaning="GPUs that the model may use, such as `0;2`, or `cpu`; without it or with `*`, all. Of those it takes "
        "the ones with the most free memory",
    ),
    Option(
        key="option.pipeline_parallel_degree",
        parser=integer(1),
        default="1",
        field="pipeline_parallel_degree",
        aliases=("option.pipeline_parallel_size",),
        variables=("PIPELINE_PARALLEL_DEGREE",),
        meaning="Groups of devices that share the layers among them",
    ),
    Option(
        key="option.predict_timeout",
        parser=SECONDS,
        default="240",
        field="predict_timeout",
        variables=("PREDICT_TIMEOUT",),
        meaning="Seconds without a new token after which a request fails",
    ),
    Option(
        key="option.model_loading_timeout",
        parser=SECONDS,
        default="1800",
        field="model_loading_timeout",
        variables=("MODEL_LOADING_TIMEOUT",),
        meaning="Seconds that loading may take",
    ),
    Option(
        key="option.enable_stateful_sessions",
        parser=BOOLEAN,
        default="true",
        field="enable_stateful_sessions",
        meaning="Serve stateful sessions on `/invocations`",
    ),
    Option(
        key="option.sessions_expiration",
        parser=integer(1, 10**9),
        default="1200",
        field="sessions_expiration",
        meaning="Seconds that a session lives",
    ),
    Option(
        key="option.sessions_path",
        parser=TEXT,
        field="sessions_path",
        meaning="Directory for sessions; without it, `/dev/shm/djl_sessions`",
    ),
    Option(
        key="option.sessions_s3url",
        parser=TEXT,
        field="sessions_s3url",
        meaning="Where in S3 sessions are kept, so that another container can go on with them",
    ),
    Option(
        key="option.quantize",
        parser=TEXT,
        argument="quantization",
        aliases=("option.quantization",),
        meaning="How weights are quantized, in the engine's words: with vLLM `awq`, `gptq`, `fp8`, ...; `bitsandbytes` "
        "with `option.rolling_batch=disable`",
    ),
    Option(
        key="option.max_rolling_batch_prefill_tokens",
        parser=integer(1),
        argument="max_num_batched_tokens",
        aliases=("option.max_num_batched_tokens",),
        meaning="Tokens in one step of the engine",
    ),
    Option(
        key="option.cpu_offload_gb_per_gpu",
        parser=TEXT,
        argument="cpu_offload_gb",
        aliases=("option.cpu_offload_gb",),
        meaning="GiB of weights, for each GPU, that stay in main memory",
    ),
)

HANDLER = (ENTRY_POINT, *HANDLER_OPTIONS)

NOT_SERVED = (
    _refused("engine", choice(("Python", "MPI")), ("Python", "MPI"), "The runtime", "give Python or leave it out"),
    _refused("option.entry_point", TEXT, (), "No option of LMI", "`option.entryPoint` is meant (OPTION_ENTRYPOINT)"),
    _refused("option.model", TEXT, (), "No option of LMI", "`option.model_id` is meant"),
    _refused("option.s3url", TEXT, (), "`option.model_id` of LMI's first versions", "`option.model_id` takes s3://"),
    _refused("option.bedrock_compat", BOOLEAN, (False,), "Format of Bedrock", "leave it out"),
    Option(
        key="option.task",
        parser=choice(
            {name: name for name in ("auto", "text-embedding", "feature-extraction", "classify", "embed")}
            | {"text-generation": "generate", "generate": "generate"}
        ),
        serves=frozenset({"auto", "generate"}),
        variables=("HF_TASK",),
        meaning="What the model does; `text-generation` is `generate`",
        advice="only text generation is served",
    ),
    _refused("option.lmcache_auto_config", BOOLEAN, (False,), "LMCache", "use `option.kv_transfer_config`"),
    _refused("option.lmcache_config_file", TEXT, (), "LMCache", "use `option.kv_transfer_config`"),
)

ENGINE_ASYNC_MODE = Option(
    key="option.async_mode",
    parser=BOOLEAN,
    default="false",
    field="async_mode",
    meaning="`/invocations` answers in the schema of LMI's asynchronous handler",
)
"""Without a custom handler."""

MEMORY = tuple(
    Option(key=f"{device}{key}", parser=integer(0), default=default, meaning=meaning)
    for device in ("", "gpu.", "cpu.")
    for key, default, meaning in (
        ("required_memory_mb", "", "MiB that the model needs, where it is loaded into a running server"),
        ("reserved_memory_mb", "" if device else "500", "MiB that have to stay free then"),
    )
)
"""`container.memory` compares them with what is free."""
MODEL_OPTIONS = (*SERVED, *HANDLER, *MEMORY, *NOT_SERVED, *LEFTOVERS)
BY_KEY: Mapping[str, Option] = {key: option for option in MODEL_OPTIONS for key in (option.key, *option.aliases)}
