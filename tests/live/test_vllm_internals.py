"""Internal parts of output processing: the real OutputProcessor and tokenizer of vLLM, with scripted engine steps."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Sequence
from copy import copy
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.engine_choice import check_release
from engines.errors import (
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestError,
)
from engines.interface import EngineStartError
from engines.request import Constraint, FinishReason, GenerationRequest, SamplingParameters, TokenDelta
from engines.statistics import EngineStatistics
from handlers.model_config import ModelConfig
from tests.python_calls import python_calls
from tests.stand_ins.recorder import Recorder
from tests.stand_ins.vllm_clients import Started, engine_request
from tests.unit.engines.test_tokenization import byte_fallback
from tests.unit.engines.transformers.byte_model import MODEL


class Failing(Recorder):
    def on_delta(self, delta: TokenDelta) -> None:
        raise RuntimeError("a bug in a contract")


class Processor:
    """Slipway's output processor, with a request state for each request. It can leave common tokens to vLLM."""

    def __init__(self, tokenizer: Any, *, lean: bool) -> None:
        from engines.vllm.copies.client import CopiesClient
        from engines.vllm.output_processor import LeanOutputProcessor

        self.tokenizer = tokenizer
        self.processor = LeanOutputProcessor(tokenizer, log_stats=True)
        self.processor.client = CopiesClient(siblings=lambda _: (), holds=lambda: False)
        self.lean = lean
        self.statistics = self.processor.statistics = EngineStatistics()

    def add(self, name: str, sink: Recorder, **fields: Any) -> None:
        from vllm import SamplingParams

        from engines.loaded_model import ModelTexts
        from engines.vllm.output import PushedState, TokensApart

        sampling: SamplingParameters = fields.pop("sampling", SamplingParameters())
        fields.setdefault("stream", True)
        fields.setdefault("want_tokens", True)
        more = {key: fields.pop(key) for key in ("interval", "siblings") if key in fields}
        place = fields.pop("place", 0)
        prompt_ids = fields.pop("prompt_ids", None)
        generation = GenerationRequest(request_id=name, prompt="x", sampling=sampling, **fields)
        names = ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")
        params = SamplingParams(stop=list(sampling.stop), **{name: getattr(sampling, name) for name in names})
        prompt_ids = self.tokenizer.encode("Prompt:") if prompt_ids is None else prompt_ids
        request = engine_request(name, prompt_token_ids=prompt_ids, sampling_params=params)
        texts, apart = ModelTexts(self.tokenizer), TokensApart(self.tokenizer)
        state = PushedState(request, generation, place, sink, self.statistics, texts, apart, **more)
        state.takes_tokens = state.takes_tokens and self.lean
        self.processor.request_states[name] = state
        self.processor.external_req_ids[name].append(name)

    def step(self, *outputs: Any) -> list[str]:
        """Do one engine step. Return the requests that vLLM would then abort in its engine."""
        from vllm.v1.metrics.stats import IterationStats

        sent = sent_outputs(outputs, lean=True)
        aborted: list[str] = self.processor.process_outputs(sent, 1.0, IterationStats()).reqs_to_abort
        return aborted


def sent_outputs(outputs: Sequence[Any], *, lean: bool) -> list[Any]:
    """Send outputs as the engine's process sends them.

    Return them as vLLM's decoder or the lean decoder reads them.
    """
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from engines.vllm.output_processor import LeanDecoder, SentOutputs

    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=list(outputs)))
    decoder = LeanDecoder(SentOutputs) if lean else MsgpackDecoder(EngineCoreOutputs)
    read: list[Any] = decoder.decode(frames).outputs
    return read


def output(name: str, ids: list[int], finish: str | None = None, logprobs: list[list[float]] | None = None) -> Any:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine import FinishReason as VllmFinishReason
    from vllm.v1.outputs import LogprobsLists

    lists = None
    if logprobs is not None:
        values = np.array(logprobs, dtype=np.float32)
        lists = LogprobsLists(np.zeros(values.shape, dtype=np.int32), values, np.ones(len(ids), dtype=np.int32), None)
    reason = VllmFinishReason[finish] if finish else None
    return EngineCoreOutput(request_id=name, new_token_ids=ids, finish_reason=reason, new_logprobs=lists)


@pytest.fixture(scope="module")
def tokenizer(sample_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sample_model)


@pytest.fixture(params=["every token is vLLM's", "common tokens go the short way"])
def processor(request: pytest.FixtureRequest, tokenizer: Any) -> Processor:
    return Processor(tokenizer, lean=request.param.startswith("common"))


@pytest.mark.slow
def test_the_server_has_imported_all_that_it_patches_in_any_process_before_it_checks_the_names() -> None:
    script = """
import sys
import engines.vllm.engine
from engines.vllm.internals import NAMES
owners = [owner for file in NAMES if file.startswith("engines/vllm/patches/") for owner in NAMES[file]]
assert len(owners) > 20, owners
modules = [owner.partition(":")[0].split(" | ") for owner in owners]
print([names for names in modules if not sys.modules.keys() & set(names)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr  # vLLM may log lines about a GPU before this line


def test_a_vllm_of_another_release_or_with_other_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.v1.engine import EngineCoreEvent
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

    from engines.vllm.internals import check_names

    check_release(vllm.__version__)
    with pytest.raises(EngineStartError, match="is installed; Slipway was run with"):
        check_release("0.31.2")

    def make_request_output(self: Any, new_token_ids: Any, error: Any) -> None: ...

    make_request_output.__module__ = RequestState.__module__
    check_names()
    with monkeypatch.context() as changed:
        changed.delattr(LogprobsProcessor, "update_from_output")
        with pytest.raises(EngineStartError, match=r"output\.py.*it has no \S+LogprobsProcessor\.update_from_output$"):
            check_names()
    with monkeypatch.context() as changed:
        changed.setattr(RequestState, "make_request_output", make_request_output)
        with pytest.raises(EngineStartError, match=r"has make_request_output\(self, new_token_ids, error\), expected"):
            check_names()
    monkeypatch.setitem(EngineCoreEvent.__annotations__, "cause", str)
    with pytest.raises(EngineStartError, match=r"has \{type, timestamp, cause\}, expected \{type, timestamp\}"):
        check_names()


def test_what_the_next_vllm_adds_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.renderers import chat_utils
    from vllm.utils import cpu_resource_utils
    from vllm.v1.engine import EngineCoreOutput

    from engines.vllm.internals import check_names, module_of

    def get_visible_memory_node(assigned_node_ids: Any = None) -> list[int]:
        return []

    get_visible_memory_node.__module__ = cpu_resource_utils.__name__
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", get_visible_memory_node)
    monkeypatch.setitem(EngineCoreOutput.__annotations__, "error", Any)
    trackers = ModuleType("vllm.renderers.chat_utils.item_tracker")
    trackers.__spec__ = ModuleSpec(trackers.__name__, None)
    trackers._resolve_items = chat_utils._resolve_items  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trackers.__name__, trackers)
    assert module_of("_resolve_items") is chat_utils
    monkeypatch.delattr(chat_utils, "_resolve_items")
    assert module_of("_resolve_items") is trackers
    check_names()
    del trackers._resolve_items  # type: ignore[attr-defined]
    with pytest.raises(
        EngineStartError, match=r"media\.py.*it has no \S+chat_utils \| \S+item_tracker\._resolve_items$"
    ):
        check_names()
    with pytest.raises(EngineStartError, match=r"it has no _resolve_items in vllm\.renderers\.chat_utils or "):
        module_of("_resolve_items")


@given(
    text=st.text(min_size=1, max_size=30),
    want_tokens=st.booleans(),
    with_logprobs=st.booleans(),
    apart=st.booleans(),
    interval=st.sampled_from([1, 3]),
)
def test_the_short_way_gives_what_vllms_way_gives(
    tokenizer: Any, text: str, want_tokens: bool, with_logprobs: bool, apart: bool, interval: int
) -> None:
    # Tokens are spelled separately only in OpenAI's answers, and only in answers with log probabilities.
    apart = apart and want_tokens and with_logprobs
    seen = []
    for lean in (False, True):
        processor, sink = Processor(tokenizer, lean=lean), Recorder()
        processor.add("a", sink, want_tokens=want_tokens, tokens_apart=apart, interval=interval)
        ids = tokenizer.encode(text)
        for place, token_id in enumerate(ids, start=1):
            logprobs = [[-0.5 * place]] if with_logprobs else None
            processor.step(output("a", [token_id], "LENGTH" if place == len(ids) else None, logprobs))
        statistics = processor.statistics
        for delta in sink.deltas:
            delta.submitted_at = 0.0
        seen.append((sink.deltas, statistics.tokens, statistics.finished_requests, sum(statistics.inter_token.counts)))
    assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Any) -> dict[str, Any]:
    """Return the sample model's tokenizer, a tokenizer with a token for each byte, and a tokenizer like Llama 2's."""
    return {"sample": tokenizer, "bytes": MODEL.tokenizer, "fallback": byte_fallback()[0]}


@settings(max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("name", ["sample", "bytes", "fallback"])
def test_a_whole_answer_has_the_text_that_its_tokens_have_one_by_one(
    tokenizers: dict[str, Any], name: str, data: st.DataObject
) -> None:
    """The tokens include special tokens, ids that no token has, and incomplete characters. They follow any prompt."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    tokenizer = tokenizers[name]
    own = st.integers(0, len(tokenizer) + 2)
    written = st.text(st.sampled_from("a \n\u00e9\u4f60\U0001f600\ufffd")).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    of_parts = st.lists(st.one_of(own.map(lambda token: [token]), written), max_size=8).map(
        lambda parts: [token for part in parts for token in part]
    )
    prompt, ids = data.draw(of_parts), data.draw(of_parts.filter(bool))
    sampling = SamplingParameters(
        skip_special_tokens=data.draw(st.booleans()),
        spaces_between_special_tokens=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    ending = data.draw(st.sampled_from(["LENGTH", "STOP", "abort"]))
    processor, sink = Processor(tokenizer, lean=True), Recorder()
    processor.add("a", sink, stream=False, want_tokens=False, prompt_ids=prompt, sampling=sampling)
    state = processor.processor.request_states["a"]
    for token_id in ids[:-1] if ending != "abort" else ids:
        processor.step(output("a", [token_id]))
    if ending == "abort":
        state.abort()
    else:
        processor.step(output("a", ids[-1:], ending))
    one_by_one = FastIncrementalDetokenizer(tokenizer, state.core_request)
    for place, token_id in enumerate(ids, start=1):
        one_by_one.update([token_id], ending == "STOP" and place == len(ids))
    (delta,) = sink.deltas
    assert (delta.text, delta.token_count, delta.last) == (one_by_one.output_text, len(ids), True)


@pytest.mark.parametrize("written", ["\ufffd{}", "{}\ufffd", "\ufffd{}\ufffd a"])
@pytest.mark.parametrize("filling", ["word", "\ufffd"])
def test_the_work_for_a_whole_text_with_replacement_characters_does_not_grow_with_it(
    tokenizers: dict[str, Any], written: str, filling: str
) -> None:
    """If the tokens were decoded one by one, each of them would call vLLM's detokenizer."""

    def last_step(fillings: int) -> int:
        processor, sink = Processor(MODEL.tokenizer, lean=True), Recorder()
        text = written.format(filling * fillings)
        *ids, last = MODEL.tokenizer.encode(text, add_special_tokens=False)
        processor.add("a", sink, stream=False, want_tokens=False)
        for token_id in ids:
            processor.step(output("a", [token_id]))
        step = output("a", [last], "LENGTH")
        calls = python_calls(lambda: processor.step(step))
        assert sink.deltas[0].text == text.rstrip("\ufffd")
        return calls

    last_step(1)
    assert last_step(1500) <= last_step(10) + 20


@pytest.mark.parametrize("alternatives", [0, 1, 200])
def test_the_lean_decoder_reads_the_log_probabilities_that_vllms_reads(alternatives: int) -> None:
    """If there are many alternatives, vLLM sends the arrays in separate frames."""
    step = output("a", [7], logprobs=[[-0.1, *(-1.0 - place for place in range(alternatives))]])
    (vllms,), (lean,) = sent_outputs([step], lean=False), sent_outputs([step], lean=True)
    assert lean.new_logprobs.chosen() == vllms.new_logprobs.logprobs[0, 0]
    for ours, theirs in zip(lean.new_logprobs.arrays()[:3], vllms.new_logprobs[:3], strict=True):
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
    lean.new_logprobs = vllms.new_logprobs
    assert [getattr(lean, name) for name in lean.__struct_fields__] == [
        getattr(vllms, name) for name in vllms.__struct_fields__
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2000,), (0, 4)])
def test_the_lean_decoder_reads_the_numbers_of_pooled_prompts_that_vllms_reads(
    dtype: str, shape: tuple[int, ...]
) -> None:
    """vLLM sends large arrays in separate frames. The type of their numbers is the type of the model's head."""
    import torch

    numbers = (torch.arange(math.prod(shape)) / 7 - 3).to(getattr(torch, dtype)).view(shape)
    for name in ("a", "ab", "abc", "abcd"):  # The data of a small array are at another address for each length.
        step = output(name, [], "STOP")
        step.pooling_output = numbers
        (lean,) = sent_outputs([step], lean=True)
        array, tensor = lean.pooling_output.array(), lean.pooling_output.tensor()
        assert (array.dtype, array.tolist()) == (np.float32, numbers.float().tolist())
        assert array.flags.aligned
        assert (tensor.dtype, tensor.tolist()) == (numbers.dtype, numbers.tolist())


def test_with_an_interval_the_parts_after_the_first_have_so_many_tokens_and_the_last_what_is_left(
    processor: Processor, tokenizer: Any
) -> None:
    sink = Recorder()
    processor.add("a", sink, interval=3)
    ids = tokenizer.encode(" one two three four five six")
    for token_id in ids[:-1]:
        processor.step(output("a", [token_id], logprobs=[[-0.5]]))
    processor.step(output("a", ids[-1:], "LENGTH", [[-0.5]]))
    assert [(delta.text, delta.token_count) for delta in sink.deltas] == [
        (" one", 1),
        (" two three four", 4),
        (" five six", 6),
    ]
    assert [[token.id for token in delta.tokens] for delta in sink.deltas] == [ids[:1], ids[1:4], ids[4:]]


def test_tokens_and_their_alternatives_have_ranks_where_wanted(processor: Processor, tokenizer: Any) -> None:
    (one,) = tokenizer.encode(" one")
    ranks = {}
    for name, wanted in (("asked", True), ("quiet", False)):
        sink = Recorder()
        processor.add(name, sink, want_logprobs=True, want_ranks=wanted, top_tokens=2)
        step = output(name, [one], "LENGTH", [[-3.0, -0.5, -1.0]])
        step.new_logprobs.sampled_token_ranks[0] = 5
        processor.step(step)
        token = sink.deltas[0].tokens[0]
        ranks[name] = (token.rank, [top.rank for top in token.top])
    assert ranks == {"asked": (5, [1, 2]), "quiet": (None, [None, None])}


def test_several_tokens_of_one_step_keep_their_own_texts(processor: Processor, tokenizer: Any) -> None:
    sink = Recorder()
    processor.add("a", sink)
    ids = tokenizer.encode(" one two 😀")
    processor.step(output("a", ids, "LENGTH", [[-1.0]] * len(ids)))
    (delta,) = sink.deltas
    assert delta.text == "".join(token.text for token in delta.tokens) == " one two 😀"
    assert [token.id for token in delta.tokens] == ids
    assert not any("\ufffd" in token.text for token in delta.tokens)


def test_tokens_that_may_begin_a_stop_string_wait_until_that_is_known(processor: Processor, tokenizer: Any) -> None:
    sink = Recorder()
    processor.add("a", sink, sampling=SamplingParameters(stop=(" two three",)))
    one, two, four = (tokenizer.encode(text)[0] for text in (" one", " two", " four"))
    released = []
    for token_id in (one, two, four, one, one):
        processor.step(output("a", [token_id]))
        released.append("".join(delta.text for delta in sink.deltas))
    assert " two" not in released[1]
    assert released[4] == " one two fou"
    shown = [token for delta in sink.deltas for token in delta.tokens]
    assert [token.text for token in shown] == [" one", " two", " four"][: len(shown)]


@pytest.mark.parametrize(("own", "reason"), [((7,), FinishReason.STOP), ((8,), FinishReason.EOS)])
def test_a_stop_token_that_the_request_does_not_name_is_an_end_token_of_the_model(
    processor: Processor, own: tuple[int, ...], reason: FinishReason
) -> None:
    sink = Recorder()
    processor.add("a", sink, sampling=SamplingParameters(stop_token_ids=own))
    stop = output("a", [7], "STOP")
    stop.stop_reason = 7
    processor.step(stop)
    assert sink.deltas[-1].finish_reason is reason


@pytest.mark.parametrize("finish", [None, "LENGTH"])
def test_a_bug_in_one_requests_sink_ends_that_request_alone(
    processor: Processor, tokenizer: Any, finish: str | None
) -> None:
    broken, sound = Failing(), Recorder()
    processor.add("broken", broken)
    processor.add("sound", sound)
    one = tokenizer.encode(" one")
    processor.step(output("broken", one, finish), output("sound", one, finish))
    assert [error.message for error in broken.errors] == ["internal error while handling a token"]
    assert [delta.text for delta in sound.deltas] == [" one"]
    assert ("broken" in processor.processor.request_states) is (finish is None), "vLLM aborts it"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"allowed_token_ids": (5,)}, "`allowed_token_ids` forbids every token that the constraint allows"),
        ({"bad_words": ("x",)}, "`bad_words` forbids every token that the constraint allows"),
        ({}, "the engine reported an internal error for this request"),
    ],
)
def test_a_request_that_the_engine_ends_says_which_parameter_left_it_no_token(
    processor: Processor, sampling: dict[str, Any], message: str
) -> None:
    sink = Recorder()
    constraint = Constraint(parameter="response_format", json_object=True)
    processor.add("a", sink, sampling=SamplingParameters(constraint=constraint, **sampling))
    processor.step(output("a", [], "ERROR"))
    assert [message in error.message for error in sink.errors] == [True], sink.errors


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("VLLMValidationError", InvalidRequest),
        ("RetryableRequestError", Overloaded),
        ("GenerationError", GenerationFailed),
    ],
)
def test_an_error_of_one_request_ends_this_request_alone(
    processor: Processor, tokenizer: Any, name: str, expected: type[RequestError]
) -> None:
    """vLLM 0.33 puts such an error into a sequence's queue."""
    import vllm.exceptions

    refused, sound = Recorder(), Recorder()
    processor.add("refused", refused)
    processor.add("sound", sound)
    processor.processor.request_states["refused"].queue.put(getattr(vllm.exceptions, name)("the reason"))
    processor.step(output("sound", tokenizer.encode(" one"), "LENGTH"))
    assert [(type(error), error.message) for error in refused.errors] == [(expected, "the reason")]
    assert ([delta.text for delta in sound.deltas], sound.errors) == ([" one"], [])
    assert (processor.statistics.failed_requests, processor.statistics.finished_requests) == (1, 1)


def test_a_bug_in_one_requests_sink_keeps_no_other_from_hearing_that_the_engine_died(processor: Processor) -> None:
    class Deaf(Recorder):
        def on_error(self, error: RequestError) -> None:
            raise RuntimeError("a bug in a contract")

    sound = Recorder()
    processor.add("deaf", Deaf())
    processor.add("sound", sound)
    processor.processor.propagate_error(RuntimeError("engine core died"))
    assert [type(error) for error in sound.errors] == [EngineDead]
    assert processor.statistics.failed_requests == 2


def test_an_aborted_request_hears_nothing_more(processor: Processor, tokenizer: Any) -> None:
    sink = Recorder()
    processor.add("a", sink)
    processor.processor.request_states["a"].ended = True
    assert processor.processor.abort_requests(["a"], internal=True) == ["a"]
    processor.step(output("a", tokenizer.encode(" one")))
    assert (sink.deltas, sink.errors) == ([], [])


@pytest.mark.asyncio
async def test_a_call_that_ends_before_all_its_sequences_are_made_leaves_none_in_the_engine(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engine might answer some sequences of a prompt that it does not have, as far as the call knows."""
    from vllm import SamplingParams

    from engines.loaded_model import ModelTexts
    from engines.vllm import engine as vllm_engine
    from engines.vllm.output import TokensApart

    processor, started = Processor(tokenizer, lean=True).processor, Started(monkeypatch, 1)
    engine: Any = vllm_engine.VllmEngine(ModelConfig(name="m", model_dir=Path(), model_id="m"))
    engine.async_llm = SimpleNamespace(output_processor=processor)
    engine._answers_prompts, engine._traced, engine._stream_interval = True, False, 1
    engine._registered, engine._copies = processor.request_states, SimpleNamespace(client=started.client)
    engine.texts, engine._apart = ModelTexts(tokenizer), TokensApart(tokenizer)
    prepared = vllm_engine._Prepared([1, 2, 3], engine_request("r"), SamplingParams())
    monkeypatch.setattr(engine, "_prepared", AsyncMock(return_value=prepared))
    request = GenerationRequest(request_id="r", prompt=(1, 2, 3), sequences=40, candidates=40, stream=True)
    ending = asyncio.create_task(engine.submit(request, Recorder()))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert (started.copies[0].client.added_ids, processor.request_states) == ([], {})
    await engine.submit(request, Recorder())
    assert started.copies[0].client.added_ids == list(processor.request_states)
    assert len(processor.request_states) == 40


def test_the_engines_own_tokenizer_is_none_of_vllms_pool(sample_model: Path) -> None:
    """If vLLM's pool is empty, it copies the tokenizer on the event loop, which takes tenths of a second."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin, maybe_make_thread_pool
    from vllm.v1.engine.detokenizer import uses_fast_detokenizer

    from engines.loaded_model import ModelTexts
    from engines.vllm.loading import own_tokenizer

    config = AsyncEngineArgs(model=str(sample_model)).create_model_config()
    pool = maybe_make_thread_pool(copy(cached_tokenizer_from_config(config)))  # as vLLM's renderer does
    own = own_tokenizer(config)
    assert isinstance(pool, ThreadSafeHFTokenizerMixin)
    assert not isinstance(own, ThreadSafeHFTokenizerMixin)
    assert uses_fast_detokenizer(own)
    pool._tokenizer.enable_truncation(1)
    cached_tokenizer_from_config(config)._tokenizer.enable_truncation(1)
    assert len(ModelTexts(own).encode("one two three")) > 1


def test_a_model_that_is_gone_leaves_no_tokenizer_in_vllms_caches(sample_model: Path) -> None:
    from transformers import PythonBackend, TokenizersBackend
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.tokenizers.hf import maybe_make_thread_pool
    from vllm.transformers_utils.processor import cached_get_processor
    from vllm.utils.func_utils import supports_kw

    from engines.vllm.async_llm import forget_tokenizers

    def used() -> list[weakref.ref[Any]]:
        """Use tokenizers as vLLM's renderer does, and return weak references to them."""
        config = AsyncEngineArgs(model=str(sample_model)).create_model_config()
        pool = maybe_make_thread_pool(cached_tokenizer_from_config(config))
        supports_kw(pool.apply_chat_template, "tools")
        processor = cached_get_processor(str(sample_model), processor_cls=(PythonBackend, TokenizersBackend))
        return [weakref.ref(pool), weakref.ref(type(pool)), weakref.ref(processor)]

    left = used()
    gc.collect()
    assert None not in [reference() for reference in left]
    forget_tokenizers()
    gc.collect()
    assert [reference() for reference in left] == [None, None, None]


def test_the_option_that_rules_out_log_probabilities_of_the_prompt_is_named(sample_model: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.sampling import prompt_logprobs_refusal

    config = AsyncEngineArgs(model=str(sample_model), kv_sharing_fast_prefill=True).create_engine_config()
    assert prompt_logprobs_refusal(config).endswith("are not served with option.kv_sharing_fast_prefill=true")
