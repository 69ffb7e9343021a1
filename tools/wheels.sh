#!/usr/bin/env bash
# Wheels of qiao-cpu in dist/: for this machine's processor, and on x86-64 also for aarch64 where g++-aarch64-linux-gnu
# is installed. Their tags say linux, not manylinux: they ask for the C library named at the end, which is this system's
# and newer than that of older distributions. Build them in a manylinux image to have them run there too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

wheel() {
    "$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist plugins/cpu
}

wheel
if [ "$(uname -m)" = x86_64 ] && command -v aarch64-linux-gnu-g++ >/dev/null; then
    _PYTHON_HOST_PLATFORM=linux-aarch64 CXX=aarch64-linux-gnu-g++ \
        SKBUILD_CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=aarch64" wheel
else
    echo "make wheels: no aarch64 wheel, for that needs x86-64 and aarch64-linux-gnu-g++ (on Debian: g++-aarch64-linux-gnu)"
fi

for file in dist/qiao_cpu-*.whl; do
    folder=$(mktemp -d)
    "$python" -m zipfile -e "$file" "$folder"
    versions=$(strings -a "$folder"/qiao_cpu/libqiao_cpu.so | grep -oE '^(GLIBC|GLIBCXX)_[0-9.]+$' | sort -uV)
    rm -rf "$folder"
    echo "$file needs $(grep '^GLIBC_' <<<"$versions" | tail -1) and $(grep '^GLIBCXX_' <<<"$versions" | tail -1)"
done
