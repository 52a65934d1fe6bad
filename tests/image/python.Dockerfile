# Debian 12 with this machine's Python in /usr/local, like the images named `python`. The build context is Python's prefix.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libncursesw6 \
        libnsl2 libreadline8 libsqlite3-0 libssl3 libtirpc3 libuuid1 zlib1g \
    && rm -rf /var/lib/apt/lists/*
COPY . /usr/local/
RUN rm -rf /usr/local/lib/python3.*/site-packages \
    && ldconfig \
    && python3 -m ensurepip
