#!/usr/bin/env bash
# Makes .venv with every distribution of the workspace installed editable, and does nothing when nothing changed.
#
#   PYTHON=...       interpreter to use (3.10 to 3.12); without it the first fitting one on PATH
#   TORCH_INDEX=...  package index to take torch from, for example one that holds CPU-only builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.qiao-setup
projects=(. plugins/conformance plugins-ascend plugins-cambricon plugins-dcu plugins-cuda)

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

# What the environment depends on: the declarations, this script, the chosen interpreter and the folder's own place
# (an environment cannot be moved).
key=$({
    cat requirements/dev.txt tools/setup.sh
    for project in "${projects[@]}"; do cat "$project/pyproject.toml"; done
    echo "$PWD ${PYTHON:-} ${TORCH_INDEX:-}"
} | cksum)

if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$key" ]; then
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

pip() {
    $venv/bin/python -m pip --disable-pip-version-check install "$@"
}

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
echo "make setup: done; commands are in $venv/bin"
