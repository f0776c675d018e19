#!/usr/bin/env bash
# The one environment of the engine tests: real SGLang on the CPU. About three minutes and 2.2 GB the first time.
set -euo pipefail
venv=${1:?usage: setup_env.sh VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip torch==2.13.0 'numpy<2.4'
# --no-deps: SGLang's declared dependencies are CUDA builds of several GB that the CPU path never imports.
pip --no-deps sglang==0.5.12.post1 compressed-tensors==0.20.1
pip --requirement "$here/requirements.txt"
pip --editable "$root" pytest pytest-timeout
