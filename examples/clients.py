"""One chat by six clients: clients.py http://localhost:8080

pip install openai litellm langchain-openai anthropic huggingface_hub
"""

import sys

import litellm
from anthropic import Anthropic
from huggingface_hub import InferenceClient
from langchain_openai import ChatOpenAI
from openai import OpenAI

host = sys.argv[1]
chat = [{"role": "user", "content": "What is the capital of France?"}]
limits = {"max_tokens": 8, "temperature": 0}
one = OpenAI(base_url=f"{host}/v1", api_key="none").chat.completions.create(model="model", messages=chat, **limits)
other = OpenAI(base_url=f"{host}/openai/v1", api_key="none")
two = other.chat.completions.create(model="gpt-4o", messages=chat, **limits)
three = litellm.completion("hosted_vllm/model", chat, api_base=f"{host}/v1", **limits)
four = ChatOpenAI(model="model", base_url=f"{host}/v1", api_key="none", **limits).invoke(chat)
five = Anthropic(base_url=host, api_key="none").messages.create(
    model="model", messages=chat, max_tokens=8, extra_body={"temperature": 0}
)
six = InferenceClient(base_url=host).chat_completion(chat, **limits)
texts = [answer.choices[0].message.content for answer in (one, two, three, six)]
print({*texts, four.content, five.content[0].text})
