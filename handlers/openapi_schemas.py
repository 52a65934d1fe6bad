"""JSON schemas for the API description, made from the code that reads requests.

`parameters` runs a parser with a reader that records the name, type, range and default of each parameter. `struct`
makes a schema of a msgspec struct. `MEANINGS` describes each field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from handlers.parsing.json_fields import Kind, ParameterReader, Reader

Schema = Mapping[str, Any]

ANYTHING: Schema = {}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}

# Descriptions of the fields of requests. A name means the same in all contracts.
MEANINGS = {
    "adapter_id": "Name of a LoRA adapter.",
    "adapters": "Name of a LoRA adapter, or an array with a name for each prompt.",
    "add_generation_prompt": "End the prompt with the beginning of the assistant's answer.",
    "add_special_tokens": "Add the model's special tokens; by default true for a prompt and false for a chat.",
    "continue_final_message": "The prompt ends with the last message, which the answer continues.",
    "chat_template_kwargs": "Variables of the chat template.",
    "allowed_token_ids": "Only these tokens are generated.",
    **dict.fromkeys(("bad_words", "bad_sequences"), "Texts that are not generated."),
    "best_of": "Number of candidates; the best are returned.",
    "decoder_input_details": "Return the prompt's tokens in details.prefill.",
    "details": "Return details of the generation.",
    "detokenize": "False: the texts are empty.",
    "dimensions": "Length to which each vector is cut.",
    "do_sample": "Use sampling; other parameters may imply it.",
    "early_stopping": "Beam search: stop when the number of complete sequences reaches the number of beams.",
    "embedding_request": "For embedding models, JSON in a string: `input` and `pooling_params`.",
    "end_id": "Token that ends the generation, in place of the model's end tokens; -1: none.",
    "exclude_input_in_output": "Leave the prompt out of text_output; by default true in streams and for TensorRT-LLM.",
    "frequency_penalty": "Discourages frequent tokens.",
    "grammar": "TGI's constraint: `type` (json, json_object, json_schema or regex) and `value`.",
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
        "Earlier form of structured_outputs.",
    ),
    "guided_decoding": "Earlier name of structured_outputs.",
    "guided_decoding_guide": "JSON schema, regular expression or grammar.",
    "guided_decoding_guide_type": "One of json, json_schema, regex, ebnf_grammar.",
    "id": "Returned in every response.",
    "ids": "Token ids, or an array of arrays of them.",
    **dict.fromkeys(("ignore_eos", "ignore_eos_token"), "Continue after the end-of-sequence token."),
    "image": "Images in base64. The prompt must have the model's placeholder for each image.",
    "include_stop_str_in_output": "Keep the text of `stop` in the answer.",
    "inputs": "The prompt; in LMI also an array of prompts.",
    **dict.fromkeys(("prompt", "text_input"), "The prompt."),
    "guided_decoding_backend": "Accepted without effect.",
    "json_format": "Form of a JSON answer: field names and types, or a JSON schema.",
    "json_format_is_json_schema": "json_format is a JSON schema.",
    "length_penalty": "Beam search: a value above 1 favours longer sequences.",
    "logit_bias": "For each token id, a number from -100 to 100 to add to its logit.",
    "logprobs": "Number of alternatives for each token in Triton's output `logprobs`; otherwise without effect.",
    "load_inplace": "Replace an adapter that has this name.",
    "lora_int_id": "Accepted without effect.",
    "lora_name": "Name of a LoRA adapter.",
    "lora_path": "Directory or URL of the adapter's files.",
    "lora_task_id": "Refused: adapters are chosen by name.",
    "max_length": "Number of tokens to keep; by default the model's context.",
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "Maximum number of new tokens."),
    "messages": "A chat, instead of a prompt.",
    **dict.fromkeys(("min_tokens", "min_new_tokens", "min_length"), "Minimum number of new tokens."),
    "min_p": "Minimum probability of a token, relative to the most probable token.",
    "model": "Name of the served model; may be left out.",
    **dict.fromkeys(("n", "num_return_sequences"), "Number of sequences; above 1 needs sampling or beam search."),
    **dict.fromkeys(
        ("num_beams", "beam_width"), "Number of beams; above 1 switches beam search on. Refused in streams."
    ),
    "normalize": "Scale each vector to the length 1.",
    "num_tokens_in_chunk": "Minimum number of tokens in a chunk.",
    "output_formatter": "Format of this answer: json, jsonlines or sse.",
    "parameters": "Parameters of the generation.",
    "pad_id": "Accepted without effect.",
    "presence_penalty": "Discourages tokens that have already occurred.",
    "prompt_in_response": "Return the prompt.",
    "prompt_name": "Name of a prompt in the model's files. This prompt is put in front of each text.",
    "prompt_logprobs": "Accepted without effect.",
    "query": "The text for which each of `texts` gets a score.",
    "raw_scores": "Return the model's scores without a sigmoid or softmax.",
    "repetition_penalty": "A value above 1 discourages repetition.",
    "request_id": "The request's id.",
    "response_pool": "The answer is one of these texts. Refused with min_tokens or json_format.",
    **dict.fromkeys(
        ("return_context_logits", "return_generation_logits", "watermark", "is_3d_lora_weight"), "Refused if true."
    ),
    "response_format": "OpenAI's constraint; also takes the values of grammar.",
    **dict.fromkeys(
        ("return_cumulative_logprob", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
        "Return the output that has this name without `return_`.",
    ),
    "return_full_text": "The text begins with the prompt.",
    "return_log_probs": "Return the outputs cum_log_probs and output_log_probs.",
    "return_text": "Repeat each text in the answer.",
    "return_logprobs": "Return the output `logprobs`; needs the parameter `logprobs`.",
    "sampling_parameters": "All parameters, as JSON in a string. Refused if there is a `lora_name` or a constraint.",
    **dict.fromkeys(("seed", "random_seed"), "Seed for sampling; random by default."),
    "sentences": "The texts that are compared with source_sentence.",
    "separators": "Texts at which a chunk may end.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "source_sentence": "The text with which `sentences` are compared.",
    "spaces_between_special_tokens": "Put spaces between special tokens.",
    **dict.fromkeys(("stop", "stop_sequences", "stop_words"), "Texts that end the generation."),
    "stop_token_ids": "Tokens that end the generation.",
    **dict.fromkeys(("stream", "streaming"), "Stream the answer."),
    "structured_outputs": "vLLM's constraint: json, regex, choice, grammar or json_object.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "text": "The text.",
    "texts": "The texts that get scores.",
    **dict.fromkeys(("tokens", "token_ids"), "Token ids."),
    "token_logprobs": "False: log probabilities are null.",
    "tools": "Functions that the chat's template shows to the model.",
    "top_k": "Number of most probable tokens to sample from; 0 or -1: all.",
    "top_n_tokens": "Number of alternatives for each token, in details.",
    "top_p": "Sample from the most probable tokens that together have this probability.",
    **dict.fromkeys(("truncate", "truncate_prompt_tokens"), "Number of last tokens of the prompt to keep."),
    "truncation_direction": "Side at which texts that are too long are cut.",
    "truncation_side": "Side at which the text is truncated: left or right.",
    "typical_p": "Locally typical sampling, if the engine has it.",
    "use_beam_search": "Use beam search; best_of is the number of beams.",
    "vanilla": "Treat the text as a whole text; false: as part of a longer text.",
    "with_tokens_str": "Return the tokens' texts as well.",
}


def an_object(properties: Mapping[str, Schema], *required: str, name: str = "", **more: Any) -> Schema:
    """Return the schema of an object with these fields.

    Args:
        name: If given, the API description has the schema once, under this name.
    """
    described = {key: {"description": MEANINGS.get(key, ""), **schema} for key, schema in properties.items()}
    title = {"title": name} if name else {}
    return {**title, "type": "object", "required": list(required), "properties": described, **more}


def an_array(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}


def an_answer(name: str, description: str, *fields: str) -> Schema:
    """Return the schema of an answer with these fields. The API description has the schema once, under `name`."""
    return {"title": name, "type": "object", "description": description, "properties": {key: {} for key in fields}}


def either(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of values that fit one of these schemas."""
    if not all(schemas):
        return ANYTHING
    branches = [part for schema in schemas for part in (schema["anyOf"] if schema.keys() == {"anyOf"} else [schema])]
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def parameters(parse: Callable[[Reader], object]) -> dict[str, Schema]:
    """Return the schemas of the parameters that a parser reads, keyed by the parameter's name.

    Args:
        parse: Calls the parser with an empty object and the given reader.
    """
    asked = _Asked()
    parse(lambda values: asked)
    return asked.properties


class _Asked(ParameterReader):
    """A reader without values. It makes a schema of each parameter that a parser asks for."""

    def __init__(self) -> None:
        super().__init__({})
        self.properties: dict[str, Schema] = {}

    def _take(self, name: str, kind: Kind, default: Any, **limits: Any) -> Any:
        schema = {"type": kind, **{limit: value for limit, value in limits.items() if value is not None}}
        self.properties[name] = schema if default in (None, []) else {**schema, "default": default}
        return default


_OF_THE_STRUCT = ("title", "description")  # A struct's name and docstring, which are not for clients.


def struct(shape: type[msgspec.Struct], name: str = "") -> Schema:
    """Return the schema of a body that msgspec decodes to `shape`. Null is left out, because it counts as absent."""
    _, definitions = msgspec.json.schema_components((shape,), ref_template="{name}")
    schema = _plain(definitions[shape.__name__], definitions)
    return an_object(schema["properties"], *schema.get("required", ()), name=name)


def _plain(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return msgspec's schema without nulls and with resolved references."""
    if isinstance(schema, list):
        return [_plain(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(definitions[schema["$ref"]], definitions)
    plain = {key: _plain(value, definitions) for key, value in schema.items() if key not in _OF_THE_STRUCT}
    if plain.get("default", ...) is None:
        del plain["default"]
    if branches := [branch for branch in plain.pop("anyOf", ()) if branch != {"type": "null"}]:
        plain |= either(branches)
    if isinstance(properties := plain.get("properties"), dict):
        plain = {**plain, **an_object(properties, *plain.get("required", ()))}
    return plain
