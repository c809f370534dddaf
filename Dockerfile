# syntax=docker/dockerfile:1
# docker build -t mamba-jax .                                    CPU
# docker build -t mamba-jax:cuda --build-arg ACCELERATOR=cuda .  NVIDIA GPUs; run with --gpus all
# docker build -t mamba-jax:tpu --build-arg ACCELERATOR=tpu .    TPU hosts
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
# The compiler builds the native CPU operations; the final image does not contain it. Debian removes superseded versions
# from its mirrors, so a pinned version would stop building.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY LICENSE README.md pyproject.toml setup.py ./
COPY kernels_pallas kernels_pallas
COPY mamba_jax mamba_jax
COPY checkpoints checkpoints
COPY serving serving
# One of the extras of pyproject.toml: empty (CPU), cuda or tpu.
ARG ACCELERATOR=""
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/mamba-jax \
    && /opt/mamba-jax/bin/pip install --disable-pip-version-check ".[traces${ACCELERATOR:+,${ACCELERATOR}}]"

FROM python:${PYTHON_VERSION}-slim-bookworm
COPY --from=build /opt/mamba-jax /opt/mamba-jax
# Downloads go to /cache/huggingface and compiled programs to /cache/mamba-jax.
RUN useradd --create-home --home-dir /workspace --uid 1000 mamba-jax \
    && install --directory --owner=mamba-jax --group=mamba-jax --mode=0700 /cache
ENV PATH=/opt/mamba-jax/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /workspace
VOLUME ["/cache"]
EXPOSE 8000
# /ready is 503 until the model is loaded and its programs are compiled: up to half an hour for large models.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["mamba-jax"]
CMD ["serve", "demo", "--host", "0.0.0.0", "--port", "8000"]
