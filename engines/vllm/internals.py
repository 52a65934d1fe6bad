"""vLLM's private names: a table of all names that Slipway reads, calls, overrides or replaces.

At each start of an engine, `check_names` compares the table with the modules of vLLM that the server has imported.
`make next-vllm VERSION=...` compares the whole table, including types and defaults, with the wheel of another release.
It does not install or import that release (`tests.next_vllm`). `engines.vllm.patches` replaces names of modules and
classes. A method of a single object is replaced where the object is created.

In the product, only `engines.vllm` imports from `vllm.v1`. No other package uses names of vLLM's engine that begin with
an underscore. `handlers.openai.vllm` and `handlers.openai.media.connector` use such names of vLLM's front end.

The table describes the release `engines.vllm.RELEASE`, and the known changes of the next release. The tests named
`*_internals.py` check the meaning of the names.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from engines.interface import EngineStartError
from engines.vllm import RELEASE

_TABLE = """
engines/vllm/async_llm.py
    vllm.v1.engine.async_llm:AsyncLLM
        abort(self, request_id, internal=)
        _run_output_handler(self)
        output_handler output_processor logger_manager renderer engine_core
    vllm.v1.engine.output_processor:OutputProcessor
        propagate_error(self, e)
        request_states external_req_ids
    vllm.v1.engine.output_processor:RequestState
        queue stats request_id external_req_id prompt_len lora_request
    vllm.v1.metrics.stats:RequestStateStats
        scheduled_ts queued_ts last_token_ts arrival_time num_generation_tokens
    vllm.sampling_params:SamplingParams
        structured_outputs
    vllm.sampling_params:StructuredOutputsParams
        json json_object regex choice grammar structural_tag
    vllm.v1.metrics.loggers:StatLoggerManager
        stat_loggers
    vllm.renderers.base:BaseRenderer
        get_eos_token_id(self)
    vllm.tokenizers.registry
        cached_get_tokenizer
    vllm.transformers_utils.processor
        cached_get_processor
    vllm.utils.func_utils
        _supports_kw(callable, kw_name, *, requires_kw_only=, allow_var_kwargs=)
    vllm.envs
        VLLM_COMPUTE_NANS_IN_LOGITS
engines/vllm/output_processor.py
    vllm.v1.engine:EngineCoreOutput
        {request_id, new_token_ids, new_logprobs, new_prompt_logprobs_tensors, pooling_output, finish_reason,
            stop_reason, events, kv_transfer_params, ec_transfer_params, trace_headers, prefill_stats,
            routed_experts, num_nans_in_logits, mm_cache_miss_hashes, new_sampling_mask, spec_decode_metrics,
            prompt_token_id_logprobs, error?}
    vllm.v1.engine:EngineCoreOutputs
        {engine_index, outputs, scheduler_stats, timestamp, utility_output, finished_requests, wave_complete,
            start_wave, weight_version}
    vllm.v1.engine:EngineCoreEvent
        {type, timestamp}
    vllm.v1.engine:EngineCoreEventType
        QUEUED SCHEDULED
    vllm.v1.outputs:LogprobsLists
        {logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens}
    vllm.v1.serial_utils:MsgpackDecoder
        __init__(self, t=, share_mem=, oob_tensor_provider=)
        dec_hook(self, t, obj)
        _decode_tensor(self, arr)
        aux_buffers
    vllm.v1.engine.output_processor:OutputProcessor
        __init__(self, tokenizer, *, log_stats, stream_interval=, tracing_enabled=, admission_stats=)
        process_outputs(self, engine_core_outputs, engine_core_timestamp=, iteration_stats=, weight_version=)
        add_request(self, request, prompt, parent_req=, request_index=, queue=)
        propagate_error(self, e)
        _update_stats_from_output(self, req_state, engine_core_output, engine_core_timestamp, iteration_stats)
        request_states
    vllm.v1.engine.output_processor:RequestState
        is_prefilling stats detokenizer
    vllm.v1.metrics.stats:RequestStateStats
        num_generation_tokens arrival_time last_token_ts
    vllm.v1.metrics.stats:IterationStats
        num_generation_tokens inter_token_latencies_iter iteration_timestamp
engines/vllm/output.py
    vllm.v1.engine.output_processor:RequestState
        __init__(self, request_id, external_req_id, parent_req, request_index, lora_request, output_kind, prompt,
            prompt_token_ids, prompt_embeds, logprobs_processor, detokenizer, max_tokens_param, arrival_time, queue,
            log_stats, stream_interval, top_p=, n=, temperature=, stream_input=, remote_prefill_cached_tokens=)
        make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=,
            ec_transfer_params=, error=)
        prompt_len parent_req request_index detokenizer logprobs_processor lora_request prompt_token_ids
    vllm.v1.engine.logprobs:LogprobsProcessor
        {tokenizer, logprobs, prompt_logprobs, cumulative_logprob, num_logprobs, num_prompt_logprobs,
            prompt_token_id_logprobs}
        update_from_output(self, output)
        _correct_decoded_token(self, token_id, context_token_ids)
    vllm.v1.engine.detokenizer
        uses_fast_detokenizer(tokenizer)
    vllm.v1.engine.detokenizer:IncrementalDetokenizer
        __init__(self)
        from_new_request(cls, tokenizer, request)
        update(self, new_token_ids, stop_terminated)
        get_next_output_text(self, finished, delta)
        token_ids output_token_ids
    vllm.v1.engine.detokenizer:FastIncrementalDetokenizer
        __init__(self, tokenizer, request)
        decode_next(self, next_token_id)
        update(self, new_token_ids, stop_terminated)
        get_next_output_text(self, finished, delta)
    vllm.v1.engine.detokenizer:SlowIncrementalDetokenizer
        __init__(self, tokenizer, request)
        decode_next(self, next_token_id)
        update(self, new_token_ids, stop_terminated)
        get_next_output_text(self, finished, delta)
    vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer
        output_text
    vllm.v1.engine.parallel_sampling:ParentRequest
        request_id n child_requests max_num_generation_tokens
    vllm.v1.engine:FinishReason
        STOP LENGTH ABORT ERROR
    vllm.v1.outputs:LogprobsTensors
        logprobs selected_token_ranks
engines/vllm/arguments/from_settings.py
    vllm.entrypoints.launchers.cli_args | vllm.entrypoints.common.cli_args
        FrontendArgs
engines/vllm/engine.py
    vllm.v1.engine:EngineCoreRequest
        {request_id, prompt_token_ids, mm_features, sampling_params, pooling_params, arrival_time, lora_request,
            cache_salt, data_parallel_rank, prompt_embeds, prompt_is_token_ids, client_index, current_wave,
            priority, trace_headers, resumable, external_req_id, reasoning_ended, reasoning_parser_kwargs,
            abort_immediately, session_id, kv_hints}
    vllm.v1.engine.async_llm:AsyncLLM
        get_supported_tasks(self)
        get_tokenizer(self)
        errored input_processor model_config vllm_config
    vllm.v1.engine.input_processor:InputProcessor
        process_inputs(self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=,
            tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, session_id=,
            kv_hints=)
    vllm.renderers.base:BaseRenderer
        process_for_engine_async(self, prompt, arrival_time, *, skip_mm_cache=, tok_params=)
        mm_processor
    vllm.renderers.chat_utils
        load_chat_template(chat_template, *, is_literal=)
engines/vllm/loading.py
    vllm.v1.engine.async_llm:AsyncLLM
        from_vllm_config(cls, vllm_config, start_engine_loop=, usage_context=, stat_loggers=, enable_log_requests=,
            aggregate_engine_logging=, disable_log_stats=, client_addresses=, client_count=, client_index=)
        shutdown(self, timeout=)
    vllm.engine.arg_utils:EngineArgs
        create_engine_config(self, usage_context=, headless=)
    vllm.renderers.base:BaseRenderer
        get_mm_processor(self)
engines/vllm/lora.py
    vllm.v1.engine.async_llm:AsyncLLM
        add_lora(self, lora_request)
        remove_lora(self, lora_id)
engines/vllm/speech.py
    vllm.config.speech_to_text:SpeechToTextParams
        {audio, stt_config, model_config, language, hotwords, task_type, request_prompt, to_language}
    vllm.renderers.inputs.preprocess
        parse_model_prompt(model_config, prompt)
    vllm.renderers.base:BaseRenderer
        render_cmpl_async(self, prompts, tok_params=, *, prompt_extras=, skip_mm_cache=)
engines/vllm/sampling.py
    vllm.v1.sample.logits_processor.interface:LogitsProcessor
        __init__(self, vllm_config, device, is_pin_memory)
        apply(self, logits)
        is_argmax_invariant(self)
        update_state(self, batch_update)
    vllm.v1.sample.logits_processor.builtin
        process_dict_updates(req_entries, batch_update, new_state)
    vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor
        __init__(self, vllm_config, req_states)
        add_request(self, req_idx, sampling_params)
        apply(self, logits, ctx)
    vllm.utils.torch_utils
        async_tensor_h2d(data, device=, dtype=, out=)
engines/vllm/metrics.py
    vllm.v1.metrics.loggers:PrometheusStatLogger
        __init__(self, vllm_config, engine_indexes=)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)
        log_engine_initialized(self)
        _counter_cls _gauge_cls _histogram_cls _spec_decoding_cls _kv_connector_cls _ec_connector_cls
        _perf_metrics_cls engine_indexes gauge_lora_info counter_generation_tokens counter_prompt_tokens
        counter_prompt_tokens_cached counter_prompt_tokens_by_source counter_request_success
        histogram_iteration_tokens histogram_max_tokens_request histogram_inter_token_latency
        histogram_max_num_generation_tokens_request histogram_n_request histogram_time_to_first_token
        histogram_e2e_time_request histogram_queue_time_request histogram_prefill_time_request
        histogram_inference_time_request histogram_decode_time_request histogram_request_num_preemptions
        histogram_prefill_kv_computed_request histogram_num_prompt_tokens_request
        histogram_num_generation_tokens_request histogram_request_time_per_output_token
    vllm.v1.metrics.stats:SchedulerStats
        {num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs, num_kv_fetch_reqs_by_stage, step_counter,
            current_wave, kv_cache_usage, iteration_details, prefix_cache_stats, connector_prefix_cache_stats,
            kv_cache_eviction_events, spec_decoding_stats, kv_connector_stats, ec_connector_stats,
            waiting_lora_adapters, running_lora_adapters, cudagraph_stats, perf_stats}
    vllm.v1.metrics.stats:IterationStats
        __init__(self)
        finished_requests num_preempted_reqs num_corrupted_reqs prompt_token_stats max_num_generation_tokens_iter
        n_params_iter time_to_first_tokens_iter inter_token_latencies_iter iteration_timestamp num_generation_tokens
    vllm.v1.metrics.stats:FinishedRequestStats
        {finish_reason, request_id, e2e_latency, num_prompt_tokens, num_preemptions, num_generation_tokens,
            max_tokens_param, queued_time, prefill_time, inference_time, decode_time, mean_time_per_output_token,
            is_corrupted, num_cached_tokens}
    vllm.v1.metrics.stats:PromptTokenStats
        get_by_source(self, source)
        computed cached_tokens total
engines/vllm/copies/core_client.py
    vllm.v1.engine.core_client:EngineCoreClient
        make_async_mp_client(vllm_config, executor_class, log_stats, client_addresses=, client_count=,
            client_index=, renderer=)
    vllm.v1.engine.core_client:AsyncMPClient
        _ensure_output_queue_task(self)
        _send_input_message(self, message, engine)
        ensure_alive(self)
        outputs_queue input_socket decoder resources utility_results vllm_config
    vllm.v1.engine.core_client:BackgroundResources
        engine_dead engine_manager
    vllm.v1.serial_utils:MsgpackDecoder
        oob_tensor_provider
    vllm.v1.engine.utils:CoreEngineProcManager
        processes
    vllm.v1.executor:Executor
        get_class(vllm_config)
    vllm.v1.pool.late_interaction
        LATE_INTERACTION_MODE_SCORE_DOC
    vllm.pooling_params:LateInteractionParams
        mode query_key
    vllm.engine.arg_utils:EngineArgs
        _resolve_device_ids(self)
        device_ids
    vllm.config:ParallelConfig
        assigned_physical_gpu_ids numa_bind_nodes numa_bind_cpus data_parallel_size local_engines_only
    vllm.config:CacheConfig
        num_gpu_blocks block_size
    vllm.config:VllmConfig
        instance_id kv_transfer_config
    vllm.config:KVTransferConfig
        engine_id
engines/vllm/copies/client.py
    vllm.v1.engine.core_client:AsyncMPClient
        add_request_async(self, request)
        abort_requests_async(self, request_ids)
        call_utility_async(self, method, *args)
        call_utility_all_async(self, method, *args)
        get_output_async(self)
        shutdown(self, timeout=)
        get_kv_event_sources(self)
    vllm.v1.engine:EngineCoreOutputs
        engine_index outputs
engines/vllm/copies/life_cycle.py
    vllm.v1.engine.core_client:AsyncMPClient
        add_lora_async(self, lora_request)
engines/vllm/copies/places.py
    vllm.utils.cpu_resource_utils
        get_allowed_cpu_list()
    vllm.utils.cpu_resource_utils:LogicalCPUInfo
        id numa_node physical_core
engines/vllm/copies/continuation.py
    vllm.v1.engine:EngineCoreRequest
        reasoning_parser_kwargs resumable sampling_params
    vllm.v1.engine.detokenizer:IncrementalDetokenizer
        output_token_ids
engines/vllm/patches/processes.py
    vllm.v1.engine.utils
        get_mp_context()
    vllm.v1.engine.coordinator
        get_mp_context()
    vllm.v1.executor.multiproc_executor
        get_mp_context()
        get_file_store_init_method()
    vllm.v1.executor.multiproc_executor:MultiprocExecutor
        _ensure_worker_termination(worker_procs)
    vllm.v1.executor.multiproc_executor:WorkerProc
        __init__(self, vllm_config, local_rank, rank, distributed_init_method, input_shm_handle, shared_worker_lock,
            is_driver_worker)
    vllm.v1.executor.abstract:Executor
        __init__(self, vllm_config)
    vllm.v1.executor.uniproc_executor
        get_file_store_init_method()
    vllm.model_executor.models.registry
        _run_in_subprocess(fn)
    vllm.distributed.device_communicators.shm_broadcast
        sched_yield()
    vllm.v1.sample.sampler
        batched_count_greater_than(x, values)
    vllm.utils.cpu_resource_utils
        get_visible_memory_node(assigned_node_ids=?)
        get_allowed_cpu_list()
        get_cgroup_memory_usage()
        DEVICE_CONTROL_ENV_VAR
engines/vllm/processes/contexts.py
    vllm.v1.engine.core_client:EngineCoreClient
        shutdown(self, timeout=)
    vllm.envs
        VLLM_RPC_BASE_PATH
engines/vllm/processes/elsewhere.py
    vllm.v1.executor.abstract:Executor
        uses_ray parallel_config
    vllm.v1.executor.ray_executor_v2:RayExecutorV2
        ray_worker_handles
    vllm.v1.executor.ray_executor_v2:RayWorkerHandle
        node_id
    vllm.config:ParallelConfig
        world_size local_world_size node_rank node_rank_within_dp
engines/vllm/patches/grammars.py
    vllm.v1.structured_output:StructuredOutputManager
        _create_grammar(self, request)
    vllm.v1.structured_output.backend_guidance
        validate_guidance_grammar(sampling_params, tokenizer=)
engines/vllm/patches/media.py
    vllm.renderers.chat_utils | vllm.renderers.chat_utils.item_tracker
        _resolve_items(items_by_modality, mm_processor, modality_order)
    vllm.renderers.chat_utils:AsyncMultiModalItemTracker
        resolve_items(self)
        _items_by_modality
    vllm.multimodal.parse:MultiModalDataParser
        __init__(self, *, target_sr=, target_channels=, audio_resample_method=, video_needs_metadata=,
            expected_hidden_size=, allow_missing_mm_embeddings=)
    vllm.engine.arg_utils:EngineArgs
        _api_process_count
engines/vllm/patches/sent_media.py
    vllm.multimodal.cache.lru:LruKeyReplicatedSenderCache
        get_and_update_item(self, mm_item, mm_hash)
        cache_if_fits(self, cache, key, value)
        _cache
    vllm.multimodal.cache.base:MultiModalProcessorCacheItemMetadata
        __init__(self, item, prompt_updates)
        item_size prompt_updates
    vllm.renderers.base:BaseRenderer
        mm_processor_cache
engines/vllm/patches/parsers.py
    vllm.parser.parser_manager:ParserManager
        get_parser(cls, tool_parser_name=, reasoning_parser_name=, enable_auto_tools=, model_name=, is_harmony=,
            tool_strict_level=, tokenizer=)
    vllm.tool_parsers.abstract_tool_parser:ToolParser
        __init_subclass__(cls, **kwargs)
    vllm.tool_parsers.utils
        _get_json_schema_from_tools(tools, parallel_tool_calls=)
        _get_tool_schema_defs(tools)
engines/vllm/parsers/classes.py
    vllm.parser.abstract_parser:Parser
        tool_strict_level
        reasoning_parser_cls: type[ReasoningParser] | None = None
        tool_parser_cls: type[ToolParser] | None = None
    vllm.parser.abstract_parser:DelegatingParser
        adjust_request(self, request)
        parse(self, model_output, request, enable_auto_tools=, model_output_token_ids=)
        parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids=, *, finished)
        extract_reasoning(self, model_output, request)
        _stream_state
    vllm.parser.abstract_parser:StreamState
        reasoning_ended prompt_reasoning_checked
    vllm.tool_parsers.abstract_tool_parser:ToolParser
        structural_tag_model: str | None = None
        supports_required_and_named
    vllm.tool_parsers.hermes_tool_parser:Hermes2ProToolParser
        __init__(self, tokenizer, tools=)
        _extract_tool_call_jsons(self, text)
        _extract_tool_name(tc_json)
        _extract_tool_args(tc_json, is_complete)
        tool_call_regex tool_call_start_token tool_call_end_token
    vllm.tool_parsers.tool_strict_level:ToolStrictLevel
        PARAMETER
    vllm.reasoning:ReasoningParser
        is_reasoning_end(self, input_ids)
        extract_content_ids(self, input_ids)
    vllm.envs
        VLLM_ENFORCE_STRICT_TOOL_CALLING
handlers/openai/vllm/engine_client.py
    vllm.v1.engine.async_llm:AsyncLLM
        add_request(self, request_id, prompt, params, arrival_time=, lora_request=, tokenization_kwargs=,
            trace_headers=, priority=, data_parallel_rank=, session_id=, prompt_text=, reasoning_ended=,
            reasoning_parser_kwargs=, kv_hints=)
        check_admission(self, n=, request_id=)
        encode(self, prompt, pooling_params, request_id, lora_request=, trace_headers=, priority=,
            tokenization_kwargs=, reasoning_ended=)
        generate(self, prompt, sampling_params, request_id, *, prompt_text=, lora_request=, tokenization_kwargs=,
            trace_headers=, priority=, data_parallel_rank=, session_id=, kv_hints=, reasoning_ended=,
            reasoning_parser_kwargs=)
        errored
    vllm.v1.engine.output_processor:RequestOutputCollector
        put(self, output)
        get_nowait(self)
        get(self)
        output request_id
handlers/openai/media/connector.py
    vllm.connections:HTTPConnection
        __init__(self, *, reuse_client=)
        async_get_bytes(self, url, *, timeout=, allow_redirects=, max_bytes=, request_budget=?)
    vllm.multimodal.media:MediaConnector
        __init__(self, media_io_kwargs=, connection=, *, allowed_local_media_path=, allowed_media_domains=,
            decoded_budget=?, download_budget=?)
        load_from_url(self, url, media_io, *, fetch_timeout=)
        load_from_url_async(self, url, media_io, *, fetch_timeout=)
        fetch_image_async(self, image_url, *, image_mode=)
        fetch_video_async(self, video_url, *, image_mode=, video_processor=)
        _assert_url_in_allowed_media_domains(self, url_spec)
        allowed_media_domains
    vllm.multimodal.media:MediaIO
        load_bytes(self, data)
        load_base64(self, media_type, data)
        load_file(self, filepath)
        get_max_bytes(self)
    vllm.multimodal.media.image:ImageMediaIO
        __init__(self, image_mode=, *?, decoded_budget=?, **kwargs)
    vllm.multimodal.media.audio:AudioMediaIO
        __init__(self, *?, decoded_budget=?, **kwargs)
    vllm.multimodal.media.video:VideoMediaIO
        __init__(self, image_io, num_frames=, **kwargs)
        image_io video_loader
    vllm.multimodal.video:VideoLoader
        read_frames(cls, cap, frame_idx, total_frames_num, *, frame_recovery=)
    vllm.multimodal.image
        open_image(fp)
    vllm.envs
        VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MEDIA_FETCH_MAX_RETRIES
handlers/openai/vllm/app.py
    vllm.entrypoints.launchers.api_server.app_state
        init_app_state(engine_client, state, args, supported_tasks=)
    vllm.entrypoints.serve.exception_handling.handlers.http
        http_exception_handler(req, exc)
    vllm.entrypoints.pooling.base.io_processor
        make_async(func, executor=)
    vllm.entrypoints.pooling.factories
        register_pooling_api_routers(app, supported_tasks, model_config=)
    vllm.entrypoints.openai.models.serving:OpenAIServingModels
        is_base_model(self, model_name)
        lora_requests
    vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat
        beam_search(self, prompt, request_id, params, lora_request=, trace_headers=, session_id=, priority=?)
    vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch
        render_batch_chat_request(self, request)
    vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion
        beam_search(self, prompt, request_id, params, lora_request=, trace_headers=, session_id=, priority=?)
        model_config
    vllm.entrypoints.speech_to_text.base.serving:SpeechToTextBaseServing
        _decode_and_chunk_speech_async
handlers/openai/vllm/chat_prompts.py
    vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat
        online_renderer
    vllm.renderers.online_renderer:OnlineRenderer
        preprocess_chat(self, request, messages, default_template, default_template_content_format,
            default_template_kwargs, tool_dicts=, parser=, *, skip_mm_cache=)
        renderer model_config chat_template chat_template_content_format default_chat_template_kwargs
    vllm.renderers.hf
        resolve_chat_template(tokenizer, chat_template, tools, *, model_config)
        resolve_chat_template_content_format(chat_template, tools, given_format, tokenizer, *, model_config)
        resolve_chat_template_kwargs(tokenizer, chat_template, chat_template_kwargs, raise_on_unexpected=)
    vllm.renderers.hf:HfRenderer
        render_messages(self, messages, params)
        get_tokenizer(self)
    vllm.renderers.chat_utils
        parse_chat_messages(messages, model_config, content_format, media_io_kwargs=, mm_processor_kwargs=)
handlers/openai/vllm/common_calls.py
    vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat
        parser_cls response_role
    vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion
        system_fingerprint default_sampling_params override_max_tokens enable_prompt_tokens_details
        enable_force_include_usage enable_per_request_metrics return_tokens_as_token_ids request_logger
    vllm.renderers.online_renderer:OnlineRenderer
        use_harmony
    vllm.config:VllmConfig
        aux_output_config speculative_config kv_transfer_config ec_transfer_config watermark_config
    vllm.envs
        VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
handlers/openai/vllm/errors.py
    vllm.entrypoints.serve.exception_handling.error_response
        create_error_response(message, err_type=, status_code=, param=)
        sanitize_message(message)
    vllm.entrypoints.serve.exception_handling.handlers.http
        sanitize_message(message)
    vllm.entrypoints.serve.exception_handling.handlers.validation
        validation_exception_handler(req, exc)
        sanitize_message(message)
    vllm.entrypoints.anthropic.serving
        sanitize_message(message)
handlers/openai/vllm/messages.py
    vllm.entrypoints.anthropic.serving:AnthropicServingMessages
        to_chat_completion_request(cls, anthropic_request, *, merge_inline_system=, disabled_thinking_effort=)
        messages_full_converter(self, generator)
        message_stream_converter(self, generator)
handlers/openai/vllm/responses.py
    vllm.entrypoints.openai.responses.serving:OpenAIServingResponses
        responses_background_stream_generator(self, response_id, starting_after=)
        responses_stream_generator(self, request, sampling_params, result_generator, context, model_name, tokenizer,
            request_metadata, created_time=)
        create_responses(self, request, raw_request=)
        _convert_generation_error_to_streaming_response(self, e)
        background_tasks response_store event_store online_renderer
handlers/openai/vllm/tokenize.py
    vllm.entrypoints.serve.tokenize.serving:ServingTokenization
        create_tokenize(self, request, raw_request)
        _check_model(self, request)
    vllm.renderers.online_renderer:OnlineRenderer
        render_chat(self, request, *, skip_mm_cache=)
        parser
    vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest
        build_tok_params(self, model_config)
handlers/openai/vllm/tool_parsers.py
    vllm.parser.parser_manager:ParserManager
        get_parser(cls, tool_parser_name=, reasoning_parser_name=, enable_auto_tools=, model_name=, is_harmony=,
            tool_strict_level=, tokenizer=)
handlers/openai/body.py
    vllm.entrypoints.openai.completion.protocol:CompletionRequest
        {model, prompt, echo, frequency_penalty, logit_bias, logprobs, max_tokens, n, presence_penalty, seed, stop,
            stream, stream_options, suffix, temperature, top_p, user, use_beam_search, top_k, min_p,
            repetition_penalty, watermarking, length_penalty, stop_token_ids, include_stop_str_in_output,
            ignore_eos, min_tokens, skip_special_tokens, spaces_between_special_tokens, truncate_prompt_tokens,
            truncation_side, allowed_token_ids, prompt_logprobs, logprob_token_ids, bad_words, prompt_embeds,
            add_special_tokens, response_format, structured_outputs, priority, request_id, session_id,
            return_tokens_as_token_ids, return_token_ids, return_weight_versions?, routed_experts_prompt_start,
            return_token_offsets, mm_payload, return_mm_kwargs, cache_salt, kv_transfer_params, ec_transfer_params,
            vllm_xargs, repetition_detection, thinking_token_budget, stream_interval, _DEFAULT_SAMPLING_PARAMS}
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest
        {messages, model, frequency_penalty, logit_bias, logprobs, top_logprobs, max_tokens, max_completion_tokens,
            n, presence_penalty, response_format, seed, stop, stream, stream_options, temperature, top_p, tools,
            tool_choice, reasoning_effort, thinking_token_budget, include_reasoning, parallel_tool_calls, user,
            use_beam_search, top_k, min_p, repetition_penalty, watermarking, length_penalty, stop_token_ids,
            include_stop_str_in_output, ignore_eos, min_tokens, skip_special_tokens, spaces_between_special_tokens,
            truncate_prompt_tokens, truncation_side, prompt_logprobs, logprob_token_ids, allowed_token_ids,
            bad_words, echo, add_generation_prompt, continue_final_message, add_special_tokens, documents,
            chat_template, chat_template_kwargs, media_io_kwargs, mm_processor_kwargs, structured_outputs, priority,
            request_id, session_id, return_tokens_as_token_ids, return_token_ids, return_weight_versions?,
            routed_experts_prompt_start, return_token_offsets, return_prompt_text, mm_payload, return_mm_kwargs,
            cache_salt, kv_transfer_params, ec_transfer_params, vllm_xargs, repetition_detection, stream_interval,
            _grammar_from_parser, _DEFAULT_SAMPLING_PARAMS}
handlers/openai/answer.py
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse
        {id, object, created, model, choices, service_tier, system_fingerprint, usage, prompt_logprobs,
            prompt_token_ids, prompt_text, kv_transfer_params, ec_transfer_params, metrics}
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionStreamResponse
        {id, object, created, model, choices, usage, system_fingerprint, prompt_token_ids, prompt_text, metrics}
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponseStreamChoice
        {index, delta, logprobs, finish_reason, stop_reason, token_ids}
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponseChoice
        {index, message, logprobs, finish_reason, stop_reason, token_ids, routed_experts}
    vllm.entrypoints.openai.completion.protocol:CompletionResponse
        {id, object, created, model, choices, service_tier, system_fingerprint, usage, kv_transfer_params,
            ec_transfer_params, metrics}
    vllm.entrypoints.openai.completion.protocol:CompletionStreamResponse
        {id, object, created, model, choices, usage, system_fingerprint, metrics}
    vllm.entrypoints.openai.completion.protocol:CompletionResponseStreamChoice
        {index, text, logprobs, finish_reason, stop_reason, prompt_token_ids, token_ids}
    vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice
        {index, text, logprobs, finish_reason, stop_reason, token_ids, prompt_logprobs, prompt_token_ids,
            routed_experts}
benchmarks/scripted_engine.py
    vllm.v1.engine:EngineCoreReadyResponse
        {max_model_len, num_gpu_blocks, block_size, dp_stats_address, dtype, vllm_version, world_size,
            data_parallel_size, tensor_parallel_size, pipeline_parallel_size, decode_context_parallel_size,
            data_parallel_rank, max_num_seqs, max_num_batched_tokens, instance_id, supports_lora, max_loras,
            mamba_block_size, kv_cache_size_tokens, kv_cache_max_concurrency, kv_events_config,
            weight_transfer_backend, enable_sleep_mode, supports_draft_weight_updates,
            effective_attention_block_size, coord_store_port?, coordinator_input_address?,
            coordinator_output_address?}
    vllm.v1.metrics.stats:PrefillStats
        {num_prompt_tokens, num_computed_tokens, num_cached_tokens, num_local_cached_tokens,
            num_external_cached_tokens, num_cache_creation_tokens}
tests/live/test_start_failure_internals.py
    vllm.v1.core.kv_cache_utils | vllm.v1.core.kv_cache_planning
        _check_enough_kv_cache_memory(available_memory, get_needed_memory, max_model_len, estimate_max_model_len)
"""

# Matches a list of fields, a function with its parameters, a field with its type and its default, or a name.
_MEMBER = re.compile(r"\{[^}]*\}|\w+\([^)]*\)|\w+: .*|\w+")
_NEW = re.compile(r"(, )?[*\w]+=?\?")


def _rows(table: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the members of vLLM's modules and classes, by the file of Slipway that uses them."""
    rows: dict[str, dict[str, list[str]]] = {}
    for file, owners in re.findall(r"^(\S+)\n((?: .*\n)+)", table, re.MULTILINE):
        found = re.findall(r"^ {4}(\S.*)\n((?: {8}.*\n)+)", owners, re.MULTILINE)
        rows[file] = {
            owner: [" ".join(member.split()) for member in _MEMBER.findall(members)] for owner, members in found
        }
    return rows


NAMES = _rows(_TABLE)
"""The members of vLLM's modules and classes (`module:class`), by the file of Slipway that uses them.

- `name` is a variable, a class, a member of an enumeration, or an attribute.
- `name(self, first, second=)` is a function or a method. A parameter with "=" has a default.
- `{first, second}` are all fields of a struct or a dataclass, without the fields of its bases.
- `name: type = default` is a field whose type and default matter. At the start, only the name is checked.

Parameters and fields that are marked with "?" exist only in the next release. `module | module` means: in this release,
the first module has the members. In the next release, the second module has them.
"""


def member_name(member: str) -> str:
    """Return the name of a member. For a list of fields, return "its fields"."""
    found = re.match(r"\w+", member)
    return found[0] if found else "its fields"


def forms(member: str) -> tuple[str, str]:
    """Return the forms that a member may have in this release and in the next release."""
    return _NEW.sub("", member), member.replace("?", "")


def module_of(name: str) -> ModuleType:
    """Import the module of vLLM that contains a name. The table lists the possible modules.

    Raises:
        EngineStartError: None of the modules contains the name.
    """
    places = next(
        owner.split(" | ")
        for owners in NAMES.values()
        for owner, members in owners.items()
        if " | " in owner and name in map(member_name, members)
    )
    for place in places:
        with suppress(ModuleNotFoundError):
            if hasattr(module := import_module(place), name):
                return module
    raise EngineStartError(f"this vLLM is not one that Slipway knows: it has no {name} in {' or '.join(places)}")


def check_names() -> None:
    """Compare the table with the modules of vLLM that have been imported.

    Raises:
        EngineStartError: A name has moved or changed. The message has the name and the file that uses it.
    """
    for file, owners in NAMES.items():
        for owner, members in owners.items():
            module, _, kind = owner.partition(":")
            places = [sys.modules[place] for place in module.split(" | ") if place in sys.modules]
            if not places or any(getattr(place.__spec__, "_initializing", False) for place in places):
                continue  # The module was not imported, or another thread is still importing it.
            holder: Any = next(
                (place for place in places if hasattr(place, kind or member_name(members[0]))), places[0]
            )
            target = getattr(holder, kind, None) if kind else holder
            for member in members:
                if (now := _now(target, member)) != member and now not in forms(member):
                    is_gone = f"it has no {owner}.{member_name(member)}"
                    differs = is_gone if now is None else f"{owner} has {now}, expected {member}"
                    raise EngineStartError(f"this vLLM {RELEASE} is not one that Slipway knows ({file}): {differs}")


def _now(target: Any, member: str) -> str | None:
    """Return a member as the imported vLLM has it, in the notation of the table. None if it no longer exists."""
    if target is None:
        return None
    if member.startswith("{"):
        types = vars(target).get("__annotations__", {})
        return f"{{{', '.join(name for name, kind in types.items() if 'ClassVar' not in str(kind))}}}"
    name = member_name(member)
    if "(" not in member:
        return member if hasattr(target, name) or name in _instance_names(target) else None
    if not hasattr(target, name):
        return None
    function = inspect.getattr_static(target, name)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or not function.__module__.startswith("vllm."):
        return member  # Slipway has replaced the function, so its parameters are not vLLM's.
    return name + _signature(inspect.signature(function))


def _instance_names(kind: Any) -> Iterator[str]:
    """Yield the fields of a class, and all names that its methods use, including the attributes that they set."""
    for each in kind.mro() if isinstance(kind, type) else ():
        yield from vars(each).get("__annotations__", ())
        for function in vars(each).values():
            if isinstance(function, FunctionType):
                yield from function.__code__.co_names


def _signature(signature: inspect.Signature) -> str:
    """Return parameters in the notation of the table."""
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty if each.default is empty else "")
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("''", "")  # The default of a parameter.
