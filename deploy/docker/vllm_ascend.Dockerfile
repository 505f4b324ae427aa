# Instance with vLLM for Ascend NPUs, on vllm-ascend's own image. Never built by this project's tests.
ARG BASE=quay.io/ascend/vllm-ascend:v0.23.0

FROM ${BASE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY async_rl async_rl
COPY inference_service inference_service
COPY trainer trainer
COPY deploy deploy
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${BASE} AS instance
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python3 -m pip install --no-cache-dir "$(echo /wheel/*.whl)[vllm]" \
    && useradd --uid 10001 --user-group --create-home async-rl \
    && install -d -o 10001 -g 10001 /runs \
    && ln -sf "$(command -v python3)" /usr/local/bin/python
COPY --chmod=755 deploy/docker/with_cann.sh /usr/local/bin/with_cann
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
WORKDIR /runs
USER 10001:10001
ENTRYPOINT ["with_cann"]
CMD ["python", "-m", "inference_service", "--engine", "vllm", "--device", "npu", "--help"]
