# Stands in for vLLM's image, which is large and needs a GPU. It has the same layout, with vLLM's CPU build. As in
# docker/Dockerfile of vLLM's repository are: Python's version and directory, vLLM without bytecode in the packages of the
# system's Python, variables, working directory, entry point. The context has requirements.txt: vLLM and its dependencies.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579
FROM ${PYTHON_IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /vllm-workspace
COPY requirements.txt torch.txt ./
# torch with its dependencies: the CUDA build, which may be the only one for this Python, needs CUDA's libraries.
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps -r requirements.txt \
    && python3 -m pip install --no-cache-dir --no-compile -r torch.txt \
    && python3 -c 'import torch'
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/cuda/lib64: \
    VLLM_ENABLE_CUDA_COMPATIBILITY=0 \
    VLLM_USAGE_SOURCE=production-docker-image
ENTRYPOINT ["vllm", "serve"]
