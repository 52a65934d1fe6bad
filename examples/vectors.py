"""Vectors by boto3, OpenAI's client and LangChain: vectors.py http://localhost:8080"""

import json
import sys

import boto3
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

host = sys.argv[1]
client = boto3.client("sagemaker-runtime", endpoint_url=host, region_name="us-east-1")
answer = client.invoke_endpoint(
    EndpointName="my-endpoint",
    ContentType="application/json",
    Body=json.dumps({"inputs": ["What is Deep Learning?", "A ship leaves the slipway."]}),
)
vectors = json.loads(answer["Body"].read())
print(len(vectors), "vectors")

openai = OpenAI(base_url=f"{host}/v1", api_key="none")
found = openai.embeddings.create(model="model", input=["What is Deep Learning?"])
print(found.usage.prompt_tokens, "tokens")

# By default, LangChain sends token ids of OpenAI's own tokenizer. This model's tokenizer gives them another meaning.
embeddings = OpenAIEmbeddings(model="model", base_url=f"{host}/v1", api_key="none", check_embedding_ctx_length=False)
print(len(embeddings.embed_documents(["a ship", "a slipway"])), "vectors")
