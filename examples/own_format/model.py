"""Formatters: clients send {"question": ...} and get {"answer": ...}, whole or as a stream of words.

The formatters are for the rolling batch, which is the default.
"""

import json

from djl_python import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
from djl_python.request_io import TextGenerationOutput, TextInput


@input_formatter
def read(input_item: Input, **kwargs) -> TextInput:
    body = input_item.get_as_json()
    prompt = kwargs["tokenizer"].apply_chat_template(
        [{"role": "user", "content": body["question"]}], tokenize=False, add_generation_prompt=True
    )
    return TextInput(input_text=prompt, parameters={"max_new_tokens": 64, "stream": body.get("stream", False)})


@output_formatter
def write(request_output: TextGenerationOutput) -> str:
    sequence = request_output.best_sequence
    if request_output.input.parameters["stream"]:
        # In a stream, this function is called for each token, and has to read this token.
        token, _, _, last = sequence.get_next_token()
        return json.dumps({"text": token.text, "last": last}) + "\n"
    if not request_output.finished:
        return ""
    return json.dumps({"answer": "".join(token.text for token in sequence.tokens)})
