# Trainer for Ascend NPUs: CANN's own image, torch_npu and MindSpeed in the versions of docs/devices.md. Never built by
# this project's tests: its base is in a registry of its own.
ARG BASE=quay.io/ascend/cann:9.0.0-910b-ubuntu22.04-py3.11

FROM ${BASE} AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/async-rl/bin:$PATH
RUN python3.11 -m venv /opt/async-rl \
    && pip install torch==2.7.1 torch_npu==2.7.1.post4
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install git+https://gitcode.com/Ascend/MindSpeed.git@core_r0.16.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY async_rl async_rl
COPY inference_service inference_service
COPY trainer trainer
COPY deploy deploy
# MindSpeed imports triton. Its package is last: on x86-64 torch brings its own, whose place this takes.
# hadolint ignore=DL3013
RUN pip install torch==2.7.1 ".[trainer,tasks]" \
    && pip install triton-ascend==3.2.0

FROM ${BASE} AS trainer
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home async-rl \
    && install -d -o 10001 -g 10001 /runs
COPY --from=packages /opt/async-rl /opt/async-rl
COPY --chmod=755 deploy/docker/with_cann.sh /usr/local/bin/with_cann
ENV PATH=/opt/async-rl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
WORKDIR /runs
USER 10001:10001
ENTRYPOINT ["tini", "--", "with_cann"]
CMD ["python", "-m", "async_rl.trainer", "--help"]
