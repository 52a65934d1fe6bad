"""Runs a batch transform job against a server on this machine, as SageMaker runs it against the container.

It asks /execution-parameters, splits the file into records, sends them, and writes FILE.out:

    python local_job.py FILE --content-type application/jsonlines --split-type Line

As on SageMaker, a refused record fails the whole file.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--content-type", required=True)
parser.add_argument("--split-type", choices=["None", "Line"], default="None")
parser.add_argument("--container", default="http://localhost:8080", help="URL of the server")
arguments = parser.parse_args()

with httpx.Client(base_url=arguments.container, timeout=600) as client:
    parameters = client.get("/execution-parameters").raise_for_status().json()
    body = arguments.file.read_bytes()
    records = [line for line in body.split(b"\n") if line] if arguments.split_type == "Line" else [body]

    def answer(record: bytes) -> bytes:
        if len(record) > parameters["MaxPayloadInMB"] << 20:
            raise SystemExit(f"a record has {len(record)} bytes; at most {parameters['MaxPayloadInMB']} MB are sent")
        reply = client.post("/invocations", content=record, headers={"Content-Type": arguments.content_type})
        if not reply.is_success:
            raise SystemExit(f"{reply.status_code} {reply.text} for {record.decode()}")
        return reply.content

    with ThreadPoolExecutor(parameters["MaxConcurrentTransforms"]) as threads:
        answers = list(threads.map(answer, records))
output = arguments.file.name + ".out"
Path(output).write_bytes(b"".join(answer.rstrip(b"\n") + b"\n" for answer in answers))  # AssembleWith=Line
print(output, len(answers), "records")
