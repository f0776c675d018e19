# SGLang with the plugin. The build fails if this SGLang lacks a name that the plugin hooks.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.12.post1-cu129

FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY sglang_patch sglang_patch
COPY loadtest loadtest
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${SGLANG_IMAGE}
LABEL org.opencontainers.image.title="crossover-engine" \
      org.opencontainers.image.description="SGLang with Crossover's switch for speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /wheels /wheels
# Without dependencies: the plugin needs the standard library and the SGLang that is there.
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 -m sglang_patch.compat
COPY deploy/docker/launch_engine.py /usr/local/bin/launch_engine.py
EXPOSE 30001 30002
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "/usr/local/bin/launch_engine.py"]
CMD ["--help"]
