"""Calls each contract of a SageMaker endpoint with boto3. The custom attribute `route` chooses the contract."""

import json

import boto3

client = boto3.client("sagemaker-runtime")


def call(route, body):
    answer = client.invoke_endpoint(
        EndpointName="my-endpoint",
        ContentType="application/json",
        CustomAttributes=f"route={route}",
        Body=json.dumps(body),
    )
    return json.loads(answer["Body"].read())


prompt = "The capital of France is"
chat = [{"role": "user", "content": "Say hello."}]
print(call("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 4}}))
print(call("/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0})["choices"])
print(call("/v1/messages", {"model": "model", "messages": chat, "max_tokens": 8})["content"])
print(call("/v2/models/model/generate", {"text_input": prompt, "parameters": {"max_tokens": 4, "temperature": 0}}))
print(call("/v1/generate", {"prompt": prompt, "max_tokens": 4, "temperature": 0}))
print(call("/tokenize", {"inputs": prompt})[0])

stream = client.invoke_endpoint_with_response_stream(
    EndpointName="my-endpoint",
    ContentType="application/json",
    CustomAttributes="route=/generate_stream",
    Body=json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": 4}}),
)
print(b"".join(event["PayloadPart"]["Bytes"] for event in stream["Body"]).decode())
