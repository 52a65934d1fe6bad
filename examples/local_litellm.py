"""litellm's SageMaker providers against a local endpoint.

litellm ignores AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME, so each call gets its whole URL as `sagemaker_base_url`. Start the
endpoint first: slipway serve --model-dir <model> --local-endpoint my-endpoint
"""

import os

os.environ.setdefault("AWS_REGION_NAME", "us-east-1")
os.environ.setdefault("AWS_ACCESS_KEY_ID", "local")
os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "local")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Otherwise litellm fetches it from GitHub.

import litellm

base = os.environ.get("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:8080")
url = f"{base}/endpoints/my-endpoint/invocations"
messages = [{"role": "user", "content": "The capital of France is"}]

for provider in ("sagemaker", "sagemaker_chat"):
    arguments = {"model": f"{provider}/my-endpoint", "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = litellm.completion(**arguments, sagemaker_base_url=url)
    print(f"{provider}, whole:   ", whole.choices[0].message.content.strip())
    stream = litellm.completion(**arguments, stream=True, sagemaker_base_url=f"{url}-response-stream")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    print(f"{provider}, streamed:", text.strip())
