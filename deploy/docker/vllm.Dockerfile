# Instance with vLLM, on vLLM's own image (CUDA). Never built by this project's tests: the image is too large, and CUDA is
# needed to run it.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${BASE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY async_rl async_rl
COPY inference_service inference_service
COPY trainer trainer
COPY deploy deploy
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${BASE} AS instance
# vLLM brings all other packages that the service needs, in versions of its own.
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python3 -m pip install --no-cache-dir "$(echo /wheel/*.whl)[vllm]" \
    && useradd --uid 10001 --user-group --create-home async-rl \
    && install -d -o 10001 -g 10001 /runs \
    && ln -sf "$(command -v python3)" /usr/local/bin/python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
WORKDIR /runs
USER 10001:10001
# Replaces the base's, which is vLLM's server; the words after it are the command.
ENTRYPOINT ["/usr/bin/env", "--"]
CMD ["python", "-m", "inference_service", "--engine", "vllm", "--help"]
