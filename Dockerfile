# fiddlex in a container, for CPUs:
#
#   docker build --tag fiddlex .
#   docker run --rm --user "$(id -u)" --volume "$PWD:/runs" fiddlex train --config=gpt_tiny --workdir=/runs/gpt_tiny
#
# and for NVIDIA GPUs, whose driver and container toolkit (nvidia-ctk) the host must have:
#
#   docker build --tag fiddlex:cuda --build-arg EXTRAS=cuda13 .
#   docker run --rm --gpus all --user "$(id -u)" --volume "$PWD:/runs" fiddlex:cuda train …

FROM python:3.11.13-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

FROM python:3.11.13-slim-bookworm
# Extras of pyproject.toml, as in cuda13,wandb. CUDA itself comes in Python packages, so that both kinds share a base.
ARG EXTRAS=""
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid=1000 fiddlex \
    && install --directory --owner=fiddlex /runs
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /runs
ENTRYPOINT ["fiddlex"]
CMD ["--help"]
