# An image of both servers: `docker build --tag pie-driver-sglang .`; with a GPU of the host:
# docker run --rm --gpus all --shm-size 1g --publish 127.0.0.1:30000:30000 \
#     --volume pie-cache:/root/.cache --volume pie-triton:/root/.triton \
#     --volume ~/.cache/huggingface:/root/.cache/huggingface pie-driver-sglang \
#     serve Qwen/Qwen3-8B --host 0.0.0.0
# With `--front gateway` the gateway serves there, which has no key without `--api-key`; `doctor` looks at the machine.
# Pie's runtime needs the driver in its own container or on its own host: install the wheel there.

FROM quay.io/pypa/manylinux_2_28_x86_64 AS build
RUN curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain 1.95.0
ENV PATH=/root/.cargo/bin:/opt/python/cp312-cp312/bin:$PATH
RUN pip install --no-cache-dir 'maturin>=1.16,<2'
WORKDIR /source
COPY . .
ARG PIE_DRIVER_COMMIT=""
RUN maturin build --release --locked --compatibility manylinux_2_28 --out /wheels

FROM python:3.12-slim-bookworm
# Triton compiles its launchers with a C compiler, and torch its CPU kernels with one for C++.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=ghcr.io/astral-sh/uv:0.9 /uv /usr/local/bin/uv
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
# Bytecode is compiled now: a start would take half a minute longer without.
RUN uv pip install --system --no-cache --compile-bytecode --constraints /tmp/constraints.txt "$(ls /tmp/wheels/*.whl)[demo,gateway]"
# An image for one model compiles its kernels now, too: RUN pie-sglang warm Qwen/Qwen3-8B --gpu h200
ENTRYPOINT ["pie-sglang"]
CMD ["doctor"]
