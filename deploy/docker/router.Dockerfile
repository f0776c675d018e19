# The router, the load test and the simulated engines: one image, no GPU.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY sglang_patch sglang_patch
COPY loadtest loadtest
RUN python -m venv /opt/crossover \
    && /opt/crossover/bin/pip install --no-cache-dir '.[loadtest]'

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="crossover-router" \
      org.opencontainers.image.description="Steers LLM requests between an EAGLE-3 and a plain SGLang server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /opt/crossover /opt/crossover
ENV PATH=/opt/crossover/bin:$PATH PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin crossover \
    && install --directory --owner=10001 --group=10001 /var/lib/crossover
USER 10001:10001
EXPOSE 30000
STOPSIGNAL SIGTERM
ENTRYPOINT ["crossover"]
CMD ["--help"]
