"""Generate requests: from a body to requests for the engine and the answer that suits the route."""

from __future__ import annotations

from handlers.contracts.family import ContractSetting
from handlers.contracts.protocol import Answer, Call, ContractError, Exchange, Reply
from handlers.contracts.triton.answer import CollectedAnswer, EventAnswer, Shape
from handlers.contracts.triton.body import read_body
from handlers.contracts.triton.errors import SeveralResponses, TritonRefusal, missing_model, refusal
from handlers.contracts.triton.parameters import TritonParameters, read_parameters
from handlers.errors import InvalidParameter, InvalidRequest, RequestError
from handlers.request import GenerationRequest


class TritonContract:
    """`/generate` or `/generate_stream` of one model."""

    def __init__(self, setting: ContractSetting, *, events: bool) -> None:
        """`events`: the answer is a stream of server-sent events, whatever `stream` says."""
        self._name = setting.settings.name
        self._on_tensorrt_llm = setting.settings.rolling_batch == "trtllm"
        self._adapters = setting.settings.enable_lora
        self._eos_token_ids = setting.model.eos_token_ids
        self._max_logprobs = setting.model.max_top_tokens
        self._events = events

    def parse(self, call: Call) -> Exchange:
        """See `Contract.parse`."""
        missing = missing_model(self._name, call.path_parameters["model"], call.path_parameters.get("version"))
        if missing is not None:
            raise ContractError(missing, "the path names a model or a version that is not served")
        _check_encoding(call)
        body = read_body(call.body, self._name)
        try:
            parameters = read_parameters(
                body,
                on_tensorrt_llm=self._on_tensorrt_llm,
                eos_token_ids=self._eos_token_ids,
                adapters=self._adapters,
            )
            if parameters.stream and parameters.vllm.sequences > 1 and not self._events:
                raise SeveralResponses
            if parameters.outputs.logprobs and (parameters.vllm.logprobs or 0) > self._max_logprobs:
                raise InvalidParameter(
                    "logprobs", f"must be at most {self._max_logprobs}, got {parameters.vllm.logprobs}"
                )
        except InvalidRequest as error:
            raise ContractError(refusal(error), error.message) from None
        shape = Shape(
            model=self._name,
            id=body.id,
            sequences=parameters.vllm.sequences,
            outputs=parameters.outputs,
            logprobs=parameters.vllm.logprobs is not None,
            lead=body.text_input if parameters.repeat_prompt else "",
            text=parameters.vllm.detokenize,
        )
        request = _request(call.request_id, body.text_input, parameters, shape)
        notes = (f"parameters without effect: {', '.join(parameters.ignored)}",) if parameters.ignored else ()
        return Exchange((request,), self._answer(shape, parameters.stream), notes)

    def refusal(self, error: RequestError) -> Reply:
        """See `Contract.refusal`."""
        return refusal(error)

    def _answer(self, shape: Shape, stream: bool) -> Answer:
        if stream and self._events:
            return EventAnswer(shape)
        return CollectedAnswer(shape, events=self._events, steps=stream)


def _check_encoding(call: Call) -> None:
    encoding = dict(call.headers).get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise TritonRefusal(f"Content-Encoding '{encoding[:80]}' is not supported; send the body as it is (identity)")


def _request(request_id: str, prompt: str, parameters: TritonParameters, shape: Shape) -> GenerationRequest:
    vllm, outputs = parameters.vllm, parameters.outputs
    shows_logprobs = outputs.logprobs and shape.logprobs
    want_logprobs = shows_logprobs or outputs.cumulative_logprob or outputs.cum_log_probs
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=vllm.sampling,
        stream=parameters.stream,
        sequences=vllm.sequences,
        candidates=vllm.candidates,
        beam_search=vllm.beam_search,
        truncate_prompt_tokens=vllm.truncate_prompt_tokens,
        want_tokens=want_logprobs,
        want_logprobs=want_logprobs,
        want_ranks=shows_logprobs,
        top_tokens=(vllm.logprobs or 0) if shows_logprobs else 0,
        adapter=parameters.adapter,
    )
