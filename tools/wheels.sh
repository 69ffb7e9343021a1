#!/usr/bin/env bash
# Wheels of qiao-cpu in dist/: for this machine's processor, and on x86-64 also for aarch64 where g++-aarch64-linux-gnu
# is installed. The C++ library is linked in, so that the C library alone decides where a wheel runs: its tag,
# manylinux_2_N (PEP 600), names the oldest glibc that has all that the kernels call. To lower N build on an older system.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --target "$work/tools" wheel==0.45.1 # rewrites tags
mkdir -p dist

# build MACHINE DEFINITIONS: one wheel, named by the glibc that it needs.
build() {
    local folder=$work/$1 file newest
    SKBUILD_CMAKE_ARGS="-DQIAO_STATIC=ON;$2" pip wheel --no-deps --no-build-isolation --wheel-dir "$folder" plugins/cpu
    file=$(echo "$folder"/qiao_cpu-*.whl)
    "$python" -m zipfile -e "$file" "$folder/content"
    if grep -aq 'libstdc++.so' "$folder/content/qiao_cpu/libqiao_cpu.so"; then
        echo "make wheels: the kernels for $1 still ask for a C++ library" >&2
        exit 1
    fi
    newest=$(grep -aoE 'GLIBC_2\.[0-9]+' "$folder/content/qiao_cpu/libqiao_cpu.so" | sort -uV | tail -1)
    newest=${newest#GLIBC_}
    PYTHONPATH=$work/tools "$python" -m wheel tags --remove --platform-tag "manylinux_${newest/./_}_$1" "$file" >/dev/null
    mv "$folder"/qiao_cpu-*.whl dist/
}

rm -f dist/qiao_cpu-*.whl
build "$(uname -m)" ""
if [ "$(uname -m)" = x86_64 ] && command -v aarch64-linux-gnu-g++ >/dev/null; then
    _PYTHON_HOST_PLATFORM=linux-aarch64 CXX=aarch64-linux-gnu-g++ \
        build aarch64 "-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=aarch64"
else
    echo "make wheels: no aarch64 wheel, for that needs x86-64 and aarch64-linux-gnu-g++ (on Debian: g++-aarch64-linux-gnu)"
fi
ls -1 dist/qiao_cpu-*.whl
