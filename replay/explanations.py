"""The differences that the documentation explains, with sentences of the documentation.

A test checks that the pages contain each sentence.

The first explanation in `EXPLANATIONS` that matches a difference counts. If it has a setting, the setting restores the
old behaviour. Otherwise the difference is permanent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from replay.answer import Answer, Framing
from replay.comparison import FROM_THE_START, Difference, Kind
from replay.request import RecordedRequest
from replay.shapes import key_of

_INVOCATIONS = r"/(invocations|predictions/.*|models/.*/invoke)"
_TGI = r"/(generate|generate_stream)?"
_OPENAI = r"(/openai)?/v1/(chat/completions|completions|responses|messages|embeddings|models).*"
_TRITON = r"/v2/models/.*"
_HAPPY = r"/v[12]/(generate|generate_stream|tokenizer|decode|split_text|metadata_text)"
_TEI = r"/(embed|embed_all|embed_sparse|rerank|predict|similarity|embeddings|decode|tokenize)?"
_ANY = r".*"

# Fields in which TGI's answers differ from LMI's.
_TGI_FIELDS = "log_?prob|special|special_token|index|seed|prefill|inputs|input_length|top_tokens|best_of_sequences"

# Fields that differ between LMI's rolling batch and its asynchronous handler.
_ASYNC_FIELDS = r"(^|\.)(log_?prob|index|seed|prefill|input_length|inputs)(\[\])?$|^(first|middle|last)$|details$"

_TWO_SCHEMAS = (
    "Since v17, LMI's images use the schema of the asynchronous handler by default. Slipway uses it with "
    "`option.async_mode=true`"
)

# Fields in vLLM's answers. Another server may omit them. Optional fields are null or absent unless the request or a
# setting asks for them.
_VLLM_FIELDS = (
    *("model", "object", "created", "service_tier", "system_fingerprint", "metrics", "prompt_logprobs", "prompt_text"),
    *("prompt_token_ids", "kv_transfer_params", "ec_transfer_params", "logprobs", "bytes", "stop_reason", "token_ids"),
    *("routed_experts", "refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning"),
    *("reasoning_content", "usage", "prompt_tokens_details", "completion_tokens_details"),
)
# Objects in vLLM's answers whose fields are in vLLM's order: an answer, a stream's records, and objects within them.
_VLLM_OBJECTS = ("", "first", "middle", "last", "choices", "message", "delta", "logprobs", "content", "usage", "data")
_VLLM_FORM = (
    "Answers in vLLM's form have vLLM's fields, in vLLM's order. A field that the request does not ask for is null."
)

_FIELDS = (Kind.MISSING, Kind.EXTRA, Kind.NULL, Kind.TYPE, Kind.ORDER, Kind.PROBABILITIES, Kind.VALUE)
_OVERLOADED = ("429", "503")
_FORM = (Kind.CONTENT_TYPE, Kind.FRAMING, Kind.EVENTS, Kind.RECORDS)


@dataclass(frozen=True)
class Explanation:
    """An explanation of differences."""

    name: str
    page: str  # A page in docs/.
    anchor: str
    statement: str  # A part of the text under the anchor's heading.
    kinds: tuple[Kind, ...]
    routes: str = _ANY  # Matches the whole path.
    where: str = ""  # A pattern that is searched for in `Difference.where`.
    # The field that `Difference.where` ends with must be one of these. The page mentions them. Empty: any field.
    fields: tuple[str, ...] = ()
    old: str = ""
    new: str = ""
    asked: tuple[str, ...] = ()  # One of these fields in the request must ask for something.
    not_asked: tuple[str, ...] = ()  # The request must leave these fields at their defaults.
    asked_zero: str = ""  # The name of a field that must be 0 in the request.
    has_null: bool = False  # If True, the request must have a null field.
    framings: tuple[Framing, ...] = ()  # The old answer must have one of these formats. Empty: any format.
    old_has: tuple[str, ...] = ()  # Fields that the old answer must have.
    old_lacks: tuple[str, ...] = ()  # Fields that the old answer must not have.
    new_has: tuple[str, ...] = ()  # The new answer must have one of these fields.
    new_says: str = ""  # A pattern that is searched for in the error of the new answer.
    is_shorter: bool = False  # If True, the new text must be the beginning of the old text.
    new_lacks: tuple[str, ...] = ()  # Fields that the new answer would have if the setting were already in effect.
    setting: str | None = None  # The setting that restores the old behaviour.

    @property
    def link(self) -> str:
        return f"docs/{self.page}#{self.anchor}"

    def matches(self, request: RecordedRequest, old: Answer, new: Answer, difference: Difference) -> bool:
        """Return True if this explanation matches a difference between the old server's answer and the new server's."""
        if difference.kind not in self.kinds or (self.framings and old.framing not in self.framings):
            return False
        if not all(old.has(name) for name in self.old_has) or any(new.has(name) for name in self.new_lacks):
            return False
        if any(old.has(name) for name in self.old_lacks):
            return False
        if self.new_has and not any(new.has(name) for name in self.new_has):
            return False
        if self.fields and key_of(difference.where) not in self.fields:
            return False
        if re.fullmatch(self.routes, request.route) is None or re.search(self.where, difference.where) is None:
            return False
        if re.search(self.old, difference.old) is None or re.search(self.new, difference.new) is None:
            return False
        if self.is_shorter and difference.kind is Kind.TEXT and not difference.old.startswith(difference.new):
            return False
        if self.new_says and re.search(self.new_says, str(new.error)) is None:
            return False
        if self.has_null and not request.has_null:
            return False
        if self.asked_zero and not request.has_zero(self.asked_zero):
            return False
        if any(request.asks(field) for field in self.not_asked):
            return False
        return not self.asked or any(request.asks(field) for field in self.asked)


EXPLANATIONS = (
    # Chats on /invocations.
    Explanation(
        "aws-chat-format",
        "tasks/from_aws_vllm.md",
        "2-keep-the-answers",
        "Chats on `/invocations` have LMI's form by default. `OPTION_CHAT_FORMAT=openai` gives them OpenAI's form.",
        (*_FIELDS, Kind.FINISH_REASON),
        _INVOCATIONS,
        fields=(*_VLLM_FIELDS, "finish_reason"),
        asked=("messages",),
        old_has=("model",),
        new_lacks=("model",),
        setting="OPTION_CHAT_FORMAT=openai",
    ),
    Explanation(
        "aws-chat-order",
        "tasks/from_aws_vllm.md",
        "2-keep-the-answers",
        "Chats on `/invocations` have LMI's form by default. `OPTION_CHAT_FORMAT=openai` gives them OpenAI's form.",
        (Kind.ORDER,),
        _INVOCATIONS,
        fields=_VLLM_OBJECTS,
        asked=("messages",),
        old_has=("model",),
        new_lacks=("model",),
        setting="OPTION_CHAT_FORMAT=openai",
    ),
    Explanation(
        "vllm-fields-on-invocations",
        "migrating.md",
        "explained-differences",
        _VLLM_FORM,
        (Kind.EXTRA, Kind.NULL),
        _INVOCATIONS,
        fields=_VLLM_FIELDS,
        asked=("prompt", "messages"),
    ),
    Explanation(
        "vllm-order-on-invocations",
        "migrating.md",
        "explained-differences",
        _VLLM_FORM,
        (Kind.ORDER,),
        _INVOCATIONS,
        fields=_VLLM_OBJECTS,
        asked=("prompt", "messages"),
    ),
    Explanation(
        "aws-chat-stream",
        "openai.md",
        "chat-and-completions-on-invocations",
        "A stream is `application/jsonlines`: each line is a `chat.completion.chunk`.",
        _FORM,
        _INVOCATIONS,
        new="json|JSON",
        asked=("messages",),
        framings=(Framing.EVENTS,),
        old_has=("model",),
        new_lacks=("model",),
        setting="option.chat_format=openai",
    ),
    Explanation(
        "aws-chat-errors",
        "openai.md",
        "errors",
        'If a chat in LMI\'s form is refused, the client gets `{"error":"...","code":424}`.',
        (Kind.STATUS, Kind.ERROR_BODY),
        _INVOCATIONS,
        fields=("", "error", "message", "type", "param", "code"),
        old=r"^(?!2\d\d$)",
        new=r"^(?!2\d\d$|5\d\d$)",
        asked=("messages",),
        setting="option.chat_format=openai",
    ),
    Explanation(
        "lmi-chat-max-tokens",
        "openai.md",
        "differences-from-lmi-on-invocations",
        "Without `max_tokens`, an answer may fill the context. LMI's default is 30, or the context.",
        (Kind.TOKENS, Kind.FINISH_REASON),
        _INVOCATIONS,
        asked=("messages",),
        not_asked=("max_tokens", "max_completion_tokens"),
    ),
    Explanation(
        "lmi-chat-top-logprobs",
        "openai.md",
        "differences-from-lmi-on-invocations",
        "`top_logprobs` is the number of alternatives in the answer. LMI always has one.",
        (Kind.PROBABILITIES, Kind.VALUE, Kind.MISSING, Kind.EXTRA),
        _INVOCATIONS,
        where="top_logprobs",
        asked=("messages",),
    ),
    # TGI's image on SageMaker.
    Explanation(
        "tgi-on-sagemaker",
        "tasks/from_tgi.md",
        "4-on-sagemaker",
        'With `OPTION_TGI_COMPAT=true`, calls with `inputs` get TGI\'s answers, such as `[{"generated_text": ...}]`.',
        _FIELDS,
        _INVOCATIONS,
        where=rf"(^|\.)({_TGI_FIELDS})(\[\])?$",
        asked=("inputs",),
        framings=(Framing.ARRAY, Framing.EVENTS),
        new_lacks=("logprob",),
        setting="OPTION_TGI_COMPAT=true",
    ),
    Explanation(
        "tgi-form-on-sagemaker",
        "lmi.md",
        "tgi-compatibility",
        "With `option.tgi_compat=true`, whole answers are arrays and streams are `sse`.",
        _FORM,
        _INVOCATIONS,
        new="json|JSON",
        asked=("inputs",),
        framings=(Framing.ARRAY, Framing.EVENTS),
        new_lacks=("logprob",),
        setting="option.tgi_compat=true",
    ),
    Explanation(
        "tgi-nulls-on-sagemaker",
        "tasks/from_tgi.md",
        "4-on-sagemaker",
        'With `OPTION_TGI_COMPAT=true`, calls with `inputs` get TGI\'s answers, such as `[{"generated_text": ...}]`.',
        (Kind.NULL,),
        _INVOCATIONS,
        where=r"^(first|middle|last)\.(generated_text|details)$",
        asked=("inputs",),
        framings=(Framing.EVENTS,),
        new_lacks=("index",),
        setting="OPTION_TGI_COMPAT=true",
    ),
    Explanation(
        "tgi-details-on-sagemaker",
        "tasks/from_tgi.md",
        "4-on-sagemaker",
        "`details` is true by default, and the details have the prompt in `inputs`.",
        (Kind.EXTRA, Kind.TYPE),
        _INVOCATIONS,
        where=r"details(\.inputs)?$",
        asked=("inputs",),
        framings=(Framing.ARRAY, Framing.EVENTS),
    ),
    Explanation(
        "tgi-errors-on-sagemaker",
        "tasks/from_tgi.md",
        "4-on-sagemaker",
        "Every error has the status 424.",
        (Kind.STATUS,),
        _INVOCATIONS,
        old="^4(22|00|13|29)$",
        new="^424$",
        asked=("inputs",),
    ),
    Explanation(
        "tgi-default-length-on-sagemaker",
        "tasks/from_tgi.md",
        "4-on-sagemaker",
        "The default of `max_new_tokens` is 30.",
        (Kind.TOKENS, Kind.FINISH_REASON),
        _INVOCATIONS,
        asked=("inputs",),
        not_asked=("max_new_tokens",),
        framings=(Framing.ARRAY, Framing.EVENTS),
    ),
    # LMI's asynchronous handler.
    Explanation(
        "lmi-async-finish-reason",
        "lmi_async.md",
        "differences-from-lmi",
        "`details.finish_reason` is `eos_token`, `stop_sequence` or `length`. In LMI, it is vLLM's stop reason, which "
        "is often null.",
        (Kind.FINISH_REASON, Kind.TYPE),
        _INVOCATIONS,
        where="finish_reason$",
        old="^null$",
        asked=("inputs",),
    ),
    Explanation(
        "lmi-async-generated-tokens",
        "lmi_async.md",
        "differences-from-lmi",
        "`details.generated_tokens` is the number of tokens. In LMI's streams, this number is too high by one.",
        (Kind.TOKENS,),
        _INVOCATIONS,
        where=r"^last\.details\.generated_tokens$",
    ),
    Explanation(
        "lmi-async-stop",
        "lmi_async.md",
        "differences-from-lmi",
        "The texts in `stop_sequences` end the answer. LMI ignores them.",
        (Kind.FINISH_REASON, Kind.TOKENS, Kind.TEXT),
        _INVOCATIONS,
        asked=("stop_sequences",),
        framings=(Framing.LINES, Framing.OBJECT),
        new="^(?!length$)",
        is_shorter=True,
    ),
    Explanation(
        "lmi-async-mode",
        "lmi_async.md",
        "lmis-asynchronous-handler",
        _TWO_SCHEMAS,
        _FIELDS,
        _INVOCATIONS,
        where=_ASYNC_FIELDS,
        asked=("inputs",),
        framings=(Framing.OBJECT, Framing.LINES),
        new_lacks=("logprob", "index"),
        setting="option.async_mode=true",
    ),
    Explanation(
        "lmi-rolling-batch",
        "lmi_async.md",
        "lmis-asynchronous-handler",
        _TWO_SCHEMAS,
        _FIELDS,
        _INVOCATIONS,
        where=rf"{_ASYNC_FIELDS}|^(first|middle|last)\.(generated_text|details)$",
        asked=("inputs",),
        framings=(Framing.OBJECT, Framing.LINES),
        old_lacks=("logprob", "index"),
        new_has=("logprob", "index"),
        setting="option.async_mode=false",
    ),
    Explanation(
        "lmi-async-nulls",
        "lmi_async.md",
        "answers",
        "In all other records of a stream, `generated_text` and `details` are null.",
        (Kind.NULL,),
        _INVOCATIONS,
        where=r"^(first|middle|last)\.(generated_text|details)$",
        asked=("inputs",),
        framings=(Framing.LINES,),
        new_lacks=("index",),
        setting="option.async_mode=true",
    ),
    # LMI's rolling batch.
    Explanation(
        "lmi-stop-reason",
        "lmi.md",
        "differences",
        "`finish_reason` is `stop_sequence` if a stop text ends the answer. In LMI with vLLM, it is `eos_token`.",
        (Kind.FINISH_REASON,),
        _INVOCATIONS,
        old="^eos_token$",
        new="^stop_sequence$",
    ),
    Explanation(
        "lmi-error-fields",
        "lmi.md",
        "differences",
        "Error objects have `error` and `code` in addition to LMI's fields.",
        (Kind.ERROR_BODY,),
        _INVOCATIONS,
        where=r"^(last\.)?(error|code)$",
        old="^absent$",
    ),
    Explanation(
        "lmi-error-message-in-streams",
        "lmi.md",
        "errors",
        "In a stream, the error's record also has `token.error_msg`",
        (Kind.ERROR_BODY,),
        _INVOCATIONS,
        where=r"token\.error_msg$",
        old="^absent$",
    ),
    Explanation(
        "lmi-error-object",
        "lmi.md",
        "errors",
        "The error of a generation has `error` and `code` in addition to the fields of an answer:",
        (Kind.ERROR_BODY,),
        _INVOCATIONS,
        where=r"^(last\.)?(generated_text|details|token|error_type)",
        asked=("inputs",),
    ),
    Explanation(
        "lmi-output-formatter",
        "lmi.md",
        "answers",
        "The request's `output_formatter` sets the form of an answer, and `option.output_formatter` sets the default.",
        _FORM,
        _INVOCATIONS,
        new="json|JSON|event",
        asked=("inputs",),
        setting="option.output_formatter",
    ),
    # TGI.
    Explanation(
        "tgi-times-in-headers",
        "tgi.md",
        "answers",
        "Only whole answers have the headers with times and numbers of tokens.",
        (Kind.HEADER,),
        _TGI,
        where="^x-(validation-time|queue-time|inference-time|time-per-token)$",
    ),
    Explanation(
        "tgi-null",
        "tgi.md",
        "differences-from-tgi",
        "`null` counts as absent for `do_sample`, `stop`, `parameters` and other fields. TGI refuses it.",
        (Kind.STATUS,),
        _TGI,
        old="^4(22|00)$",
        new="^200$",
        has_null=True,
    ),
    Explanation(
        "tgi-best-of-zero",
        "tgi.md",
        "differences-from-tgi",
        "Slipway refuses `best_of: 0`. TGI takes it as 1.",
        (Kind.STATUS,),
        _TGI,
        old="^200$",
        new="^422$",
        asked_zero="best_of",
    ),
    Explanation(
        "tgi-watermark",
        "tgi.md",
        "differences-from-tgi",
        "Slipway refuses `watermark: true`.",
        (Kind.STATUS,),
        _TGI,
        old="^200$",
        new="^422$",
        asked=("watermark",),
    ),
    Explanation(
        "tgi-constraints",
        "tgi.md",
        "fields",
        "Slipway ignores an unknown field, and logs its name. It refuses the field if the field would "
        "[constrain the text](constraints.md), or with `option.strict_parameters=true`.",
        (Kind.STATUS,),
        _TGI,
        old="^200$",
        new="^422$",
        asked=(
            "response_format",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "json_schema",
            "logit_bias",
            "bad_words",
        ),
    ),
    Explanation(
        "tgi-stop-in-token",
        "tgi.md",
        "differences-from-tgi",
        "Slipway finds a stop text within a token. TGI does not find it.",
        (Kind.TEXT, Kind.FINISH_REASON, Kind.TOKENS),
        _TGI,
        new="^(?!length$)",
        asked=("stop", "stop_sequences"),
        is_shorter=True,
    ),
    Explanation(
        "tgi-seed",
        "tgi.md",
        "answers",
        "`seed` is null if decoding is greedy. A sampled answer with details has the request's seed, or else a random "
        "seed.",
        (Kind.TYPE, Kind.NULL),
        _TGI,
        where="seed$",
    ),
    # TGI's and AWS's OpenAI routes.
    Explanation(
        "tgi-chat-tools",
        "tgi.md",
        "differences-from-tgi",
        "Tools in a chat need a parser. Slipway chooses the parser for the model, unless `option.tool_call_parser` "
        "names it.",
        (Kind.TYPE, Kind.NULL, Kind.MISSING, Kind.FINISH_REASON, Kind.VALUE),
        _OPENAI,
        where="tool_calls|content$|finish_reason$",
        asked=("tools",),
        setting="option.tool_call_parser",
    ),
    Explanation(
        "tgi-chat-tools-refused",
        "tgi.md",
        "differences-from-tgi",
        "Tools in a chat need a parser. Slipway chooses the parser for the model, unless `option.tool_call_parser` "
        "names it.",
        (Kind.STATUS,),
        _OPENAI,
        old="^200$",
        new="^400$",
        asked=("tools",),
        setting="option.tool_call_parser",
    ),
    Explanation(
        "tgi-chat-role",
        "compatibility.md",
        "suites",
        "Only the first chunk of a stream has `role`.",
        (Kind.MISSING,),
        _OPENAI,
        where=r"delta\.role$",
    ),
    Explanation(
        "tgi-fingerprint",
        "compatibility.md",
        "suites",
        "`system_fingerprint` is null.",
        (Kind.MISSING, Kind.NULL),
        _OPENAI,
        where="system_fingerprint$",
    ),
    Explanation(
        "tgi-chat-refusals",
        "compatibility.md",
        "suites",
        "A refusal has the status 400. In TGI, it has the status 422.",
        (Kind.STATUS,),
        _OPENAI,
        old="^422$",
        new="^400$",
    ),
    Explanation(
        "openai-error-object",
        "openai.md",
        "errors",
        "An error is vLLM's object: `error` has `message`, `type`, `param` and `code`.",
        (Kind.ERROR_BODY,),
        _OPENAI,
        fields=("error", "object", "message", "type", "param", "code"),
    ),
    Explanation(
        "openai-constraints",
        "openai.md",
        "constraints-on-the-text",
        "Slipway enforces or refuses every [constraint](constraints.md) in a body, including constraints that "
        "`vllm serve` ignores.",
        (Kind.STATUS,),
        _OPENAI,
        old="^200$",
        new="^400$",
        asked=(
            *("extra_body", "parameters", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids", "use_beam_search", "response_format"),
        ),
    ),
    Explanation(
        "openai-model-name",
        "openai.md",
        "the-model-of-a-request",
        "`model` in an answer is the first served name.",
        (Kind.VALUE,),
        where=r"(^|\.)model$",
        setting="option.served_model_name",
    ),
    Explanation(
        "openai-unknown-model",
        "openai.md",
        "the-model-of-a-request",
        "A request with another model name gets 404.",
        (Kind.STATUS,),
        _OPENAI,
        old="^200$",
        new="^404$",
        asked=("model",),
        new_says="does not exist",
        setting="option.served_model_name",
    ),
    Explanation(
        "openai-fields-of-vllm",
        "migrating.md",
        "explained-differences",
        _VLLM_FORM,
        (Kind.EXTRA, Kind.NULL),
        _OPENAI,
        fields=_VLLM_FIELDS,
    ),
    Explanation(
        "openai-order-of-vllm",
        "migrating.md",
        "explained-differences",
        _VLLM_FORM,
        (Kind.ORDER,),
        _OPENAI,
        fields=_VLLM_OBJECTS,
    ),
    Explanation(
        "openai-charset",
        "openai.md",
        "openai",
        "OpenAI's routes have the fields, answers and errors of `vllm serve`.",
        (Kind.CONTENT_TYPE,),
        _OPENAI,
        where="^parameters$",
    ),
    # Triton.
    Explanation(
        "triton-malformed",
        "triton.md",
        "differences-from-triton",
        "Malformed JSON and values of a wrong type get 400. In Triton, they get 500.",
        (Kind.STATUS,),
        _TRITON,
        old="^500$",
        new="^400$",
    ),
    Explanation(
        "triton-failures",
        "triton.md",
        "differences-from-triton",
        "A failed generation gets 500. In Triton, it gets 400.",
        (Kind.STATUS,),
        _TRITON,
        old="^400$",
        new="^500$",
    ),
    Explanation(
        "triton-several-responses",
        "triton.md",
        "differences-from-triton",
        "A request to `/generate` for several responses gets 400. In Triton, it gets 200 with `error`.",
        (Kind.STATUS,),
        _TRITON,
        old="^200$",
        new="^400$",
        asked=("stream",),
    ),
    Explanation(
        "triton-model-name",
        "triton.md",
        "coming-from-triton",
        "`--model-name` or `SERVING_MODEL_NAME` sets the model's name. The default is the name of the model directory.",
        (Kind.VALUE,),
        _TRITON,
        where="model_name$",
        setting="SERVING_MODEL_NAME",
    ),
    # happy_vllm.
    Explanation(
        "happy-mistakes",
        "happy_vllm.md",
        "differences-from-happy_vllm",
        "A wrong request gets 422 with the reason. In happy_vllm, it gets 500.",
        (Kind.STATUS,),
        _HAPPY,
        old="^500$",
        new="^422$",
    ),
    Explanation(
        "happy-cors",
        "happy_vllm.md",
        "coming-from-happy_vllm",
        "**CORS is off by default**",
        (Kind.HEADER,),
        _HAPPY,
        where="^access-control-allow-origin$",
        setting="SERVING_CORS_ALLOWED_ORIGIN",
    ),
    # TEI.
    Explanation(
        "tei-openai-embeddings",
        "tei.md",
        "differences-from-tei",
        "`/v1/embeddings` answers as vLLM does, and has an `id`. TEI has no `id`, scales every vector, and cuts long "
        "texts.",
        (Kind.EXTRA,),
        "(/openai)?/v1/embeddings",
        fields=("id",),
    ),
    # Every contract.
    Explanation(
        "greedy-text",
        "lmi.md",
        "the-same-request-twice",
        "Two greedy answers to the same prompt may differ. The reason is rounding, which depends on the requests that "
        "run together.",
        (Kind.TEXT,),
        where=f"^(?!.*{FROM_THE_START.strip()})",
        setting="option.dtype=fp32",
    ),
    Explanation(
        "error-messages",
        "migrating.md",
        "explained-differences",
        "Slipway has its own texts of error messages.",
        (Kind.ERROR_MESSAGE,),
    ),
)
BY_NAME: Mapping[str, Explanation] = {explanation.name: explanation for explanation in EXPLANATIONS}


def explanation_of(request: RecordedRequest, old: Answer, new: Answer, difference: Difference) -> str | None:
    """Return the name of the explanation for a difference. None if nothing explains it."""
    if difference.kind is Kind.STATUS and difference.new in _OVERLOADED:
        return None
    return next((one.name for one in EXPLANATIONS if one.matches(request, old, new, difference)), None)
