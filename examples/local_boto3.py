"""boto3 against a local endpoint: a whole answer, a stream, and an error.

Start the endpoint first: slipway serve --model-dir <model> --local-endpoint my-endpoint
"""

import json
import os

import boto3
from botocore.exceptions import ClientError

os.environ.setdefault("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:8080")
os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
os.environ.setdefault(
    "AWS_ACCESS_KEY_ID", "local"
)  # boto3 has to sign requests. The local endpoint does not check the signature.
os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "local")

client = boto3.client("sagemaker-runtime")
request = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}}

answer = client.invoke_endpoint(EndpointName="my-endpoint", ContentType="application/json", Body=json.dumps(request))
print("whole:   ", json.loads(answer["Body"].read())["generated_text"])

stream = client.invoke_endpoint_with_response_stream(
    EndpointName="my-endpoint", ContentType="application/json", Body=json.dumps(request | {"stream": True})
)
print("streamed:", end=" ")
pending = b""
for event in stream["Body"]:
    # A part may end in the middle of a record. Each record ends with a line feed.
    *lines, pending = (pending + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in lines:
        print(json.loads(line)["token"]["text"], end="", flush=True)
print()

try:
    client.invoke_endpoint(EndpointName="my-endpoint", ContentType="application/json", Body="{}")
except ClientError as error:
    print("refused: ", error.response["OriginalStatusCode"], error.response["OriginalMessage"])
