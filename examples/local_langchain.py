"""Calls a local endpoint with langchain-aws. Gets completions and chats, each as a whole answer and as a stream.

Start the endpoint first: slipway serve --model-dir <model> --local-endpoint my-endpoint
"""

import json
import os
from typing import Any

from langchain_aws.chat_models.sagemaker_endpoint import ChatModelContentHandler, ChatSagemakerEndpoint
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler, SagemakerEndpoint
from langchain_core.messages import AIMessage, AIMessageChunk

os.environ.setdefault("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:8080")
os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
os.environ.setdefault("AWS_ACCESS_KEY_ID", "local")
os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "local")

WHERE = {"endpoint_name": "my-endpoint", "region_name": "us-east-1"}


class Texts(LLMContentHandler):
    """LMI's schema. `stream`: ask for a record for each token."""

    content_type = "application/json"
    accepts = "application/json"

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
        """Return the body of a request."""
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, "stream": self.stream}).encode()

    def transform_output(self, output: Any) -> str:
        """Return the text of an answer, or of a line of a stream."""
        if self.stream:
            text: str = json.loads(output)["token"]["text"]
        else:
            text = json.loads(output.read())["generated_text"]
        return text


class Chats(ChatModelContentHandler):
    """OpenAI's schema."""

    content_type = "application/json"
    accepts = "application/json"

    def transform_input(self, prompt: Any, model_kwargs: dict[str, Any]) -> bytes:
        """Return the body of a request."""
        return json.dumps({"messages": prompt, **model_kwargs}).encode()

    def transform_output(self, output: Any) -> Any:
        """Return the message of an answer, or of a line of a stream."""
        if isinstance(output, str | bytes):
            return AIMessageChunk(content=json.loads(output)["choices"][0]["delta"].get("content") or "")
        return AIMessage(content=json.loads(output.read())["choices"][0]["message"]["content"])


texts = SagemakerEndpoint(**WHERE, content_handler=Texts(), model_kwargs={"max_new_tokens": 16})
print("whole:        ", texts.invoke("The capital of France is"))

streamed = SagemakerEndpoint(
    **WHERE, content_handler=Texts(stream=True), model_kwargs={"max_new_tokens": 16}, streaming=True
)
print("streamed:     ", "".join(streamed.stream("The capital of France is")))

chat = ChatSagemakerEndpoint(**WHERE, content_handler=Chats(), model_kwargs={"max_tokens": 16, "temperature": 0})
print("chat:         ", chat.invoke("What is the capital of France?").content)

chats = ChatSagemakerEndpoint(
    **WHERE,
    content_handler=Chats(),
    model_kwargs={"max_tokens": 16, "temperature": 0, "stream": True},
    streaming=True,
)
parts = [str(part.content) for part in chats.stream("What is the capital of France?")]
print("chat streamed:", "".join(parts))
