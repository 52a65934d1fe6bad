"""A tool call that the request forces, and its result: tool_call.py http://localhost:8080

The server needs a parser: OPTION_TOOL_CALL_PARSER=hermes OPTION_ENABLE_AUTO_TOOL_CHOICE=true make run
"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
parameters = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
question = [{"role": "user", "content": "What is the weather in Paris?"}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
asked = {"model": "model", "tools": tools, "max_tokens": 64, "temperature": 0}
reply = client.chat.completions.create(messages=question, tool_choice="required", **asked).choices[0].message
call = reply.tool_calls[0]
print(call.function.name, sorted(json.loads(call.function.arguments)))

# Run the tool, and send its result back.
result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
messages = [*question, reply.model_dump(exclude_none=True), result]
answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
print(answer.choices[0].finish_reason)
