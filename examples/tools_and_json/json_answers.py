"""One JSON schema in the contracts of OpenAI, LMI, TGI and Triton: json_answers.py http://localhost:8080"""

import json
import sys

import httpx
from openai import OpenAI

host = sys.argv[1]
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["name", "people"],
}
prompt = "Describe Paris as JSON:"


def post(path, body):
    return httpx.post(host + path, json=body, timeout=120).raise_for_status().json()


chat = OpenAI(base_url=f"{host}/v1", api_key="none").chat.completions.create(
    model="model",
    messages=[{"role": "user", "content": "Describe Paris."}],
    max_tokens=64,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
)
lmi = post("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": 64, "guided_json": schema}})
grammar = {"type": "json", "value": schema}
tgi = post("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 64, "grammar": grammar}})
triton = post(
    "/v2/models/model/generate",
    {
        "text_input": prompt,
        "parameters": {
            "max_tokens": 64,
            "temperature": 0,
            "exclude_input_in_output": True,
            "guided_json": json.dumps(schema),
        },
    },
)
texts = [chat.choices[0].message.content, lmi["generated_text"], tgi["generated_text"], triton["text_output"]]
print([sorted(json.loads(text)) for text in texts])
