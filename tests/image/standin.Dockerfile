# Stands in for vLLM's image, which is large and needs a GPU. It has the same layout, but vLLM's CPU build. The following is
# the same as in docker/Dockerfile of vLLM's repository: Python's version and directory, the variables, the working
# directory, the entry point, and the place of vLLM, which is in the system Python's packages, without bytecode.
# The build context has requirements.txt, with vLLM and its dependencies, and torch.txt.
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
# torch is installed with its dependencies. For this Python there may be only the CUDA build, which needs CUDA's libraries.
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps -r requirements.txt \
    && python3 -m pip install --no-cache-dir --no-compile -r torch.txt \
    && python3 -c 'import torch'
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/cuda/lib64: \
    VLLM_ENABLE_CUDA_COMPATIBILITY=0 \
    VLLM_USAGE_SOURCE=production-docker-image
ENTRYPOINT ["vllm", "serve"]
