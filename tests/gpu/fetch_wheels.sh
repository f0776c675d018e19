#!/bin/sh
# Fetches what the router and the load client import and a machine with SGLang may lack, unpacked,
# for Python 3.12 on x86-64 Linux:
#     tests/gpu/fetch_wheels.sh .sgl/wheels
set -eu
folder=$1
rm -rf "$folder"
python3 -m pip install --quiet --disable-pip-version-check --target "$folder" --no-deps --no-compile \
    --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
    'httptools>=0.6.4,<1'
du -sk "$folder"
