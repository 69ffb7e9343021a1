#!/usr/bin/env bash
# Makes .venv with every distribution of the workspace installed editable, and does nothing when nothing changed.
#
#   PYTHON=...       interpreter to use (3.10 to 3.12); without it the first fitting one on PATH
#   TORCH_INDEX=...  package index to take torch from, for example one that holds CPU-only builds
#   CXX=...          C++ compiler for the native CPU kernels; without it the first of c++, g++ and clang++ that works
#   NATIVE=0         leaves the native CPU kernels out; Qiao then computes with its reference plugin, which is far slower
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.qiao-setup
native_stamp=$venv/.qiao-cpu
projects=(. plugins/conformance plugins/triton plugins-ascend plugins-cambricon plugins-dcu plugins-cuda)

# Measured in 4 bit: processor time for a token with one thread, 717 ms against 15 ms (AVX2).
slower="about 45 times slower on the demo model"

fail() {
    printf 'make setup: %s\n' "$1" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not an executable"
        fits "$PYTHON" || fail "Qiao needs Python 3.10 to 3.12, but $PYTHON is $("$PYTHON" --version 2>&1)"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.12 on PATH (python3 is $(python3 --version 2>&1 || echo missing)); install one or name it: make setup PYTHON=/path/to/python3.11"
}

# A compiler that takes C++17 and has its library, or nothing.
find_compiler() {
    local candidate object
    [ "${NATIVE:-1}" = 0 ] && return
    object=$(mktemp)
    for candidate in ${CXX:-c++ g++ clang++}; do
        if command -v "$candidate" >/dev/null && printf '#include <optional>\nstd::optional<int> x;\n' |
            "$candidate" -std=c++17 -x c++ -c -o "$object" - 2>/dev/null; then
            echo "$candidate"
            break
        fi
    done
    rm -f "$object"
}

# Builds and installs qiao-cpu where its sources, the compiler or the environment are other than last time.
# A library of an older build must not stay, so without a compiler the package goes.
install_native() {
    local compiler native
    compiler=$(find_compiler)
    native=$({
        cat plugins/cpu/CMakeLists.txt plugins/cpu/pyproject.toml plugins/cpu/native/*
        echo "$key $compiler"
        [ -z "$compiler" ] || "$compiler" --version
    } | cksum)
    if [ "$(cat $native_stamp 2>/dev/null)" != "$native" ]; then
        if [ -n "$compiler" ]; then
            echo "make setup: building qiao-cpu, the native CPU kernels, with $compiler (a minute or two)"
            CXX=$compiler CMAKE_GENERATOR=Ninja pip --quiet --no-build-isolation --no-deps -c requirements/dev.txt -e plugins/cpu ||
                fail "qiao-cpu did not build; see above, or do without it: make setup NATIVE=0"
        else
            $venv/bin/python -m pip --disable-pip-version-check --quiet uninstall -y qiao-cpu 2>/dev/null || true
        fi
        echo "$native" >$native_stamp
    fi
    [ -n "$compiler" ] && return
    if [ "${NATIVE:-1}" = 0 ]; then
        echo "make setup: NATIVE=0, so the CPU computes with the reference plugin instead of qiao-cpu, $slower"
    else
        echo "make setup: no C++17 compiler (${CXX:-c++, g++, clang++}), so qiao-cpu was not built and the CPU computes with the reference plugin, $slower"
        echo "make setup: to mend that install one (on Debian and Ubuntu: apt install g++) and run make setup again"
    fi
}

# What the environment depends on: the declarations, this script, the chosen interpreter and the folder's own place
# (an environment cannot be moved).
key=$({
    cat requirements/dev.txt tools/setup.sh
    for project in "${projects[@]}"; do cat "$project/pyproject.toml"; done
    echo "$PWD ${PYTHON:-} ${TORCH_INDEX:-}"
} | cksum)

pip() {
    $venv/bin/python -m pip --disable-pip-version-check install "$@"
}

if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$key" ]; then
    install_native
    exit 0
fi

python=$(find_python)
wanted=$("$python" -c 'import sys; print(sys.version_info[:2])')
if [ ! -x $venv/bin/python ] || [ "$($venv/bin/python -c 'import sys; print(sys.version_info[:2])' 2>/dev/null)" != "$wanted" ] ||
    ! grep -qs "$PWD" $venv/bin/activate; then
    echo "make setup: creating $venv with $("$python" --version)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python lacks the venv module; install it (on Debian and Ubuntu: apt install python3-venv) or give another PYTHON="
    "$python" -m venv --clear $venv
fi

quiet=--quiet
[ -t 1 ] && quiet= # a person sees what is downloaded

echo "make setup: installing torch"
pip $quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements/dev.txt)"
echo "make setup: installing development tools"
pip --quiet -r requirements/dev.txt
echo "make setup: installing Qiao and its plugins, editable"
editable=()
for project in "${projects[@]}"; do editable+=(-e "$project"); done
pip --quiet --no-build-isolation -c requirements/dev.txt "${editable[@]}"
echo "$key" >$stamp
install_native
echo "make setup: done; commands are in $venv/bin"
