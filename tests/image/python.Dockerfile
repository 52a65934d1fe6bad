# A Python of this machine in /usr/local of Debian 12, as the images named `python` have it. The context is its prefix.
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
