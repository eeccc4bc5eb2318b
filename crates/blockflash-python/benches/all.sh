#!/bin/sh
# Runs on a GPU what the Python package has to show there: its GPU tests and its benchmarks, in the
# order of their importance, each with a limit on its time. blockflash must be installed.
#
#     crates/blockflash-python/benches/all.sh OUT
#
# OUT gets the output of each step (NAME.txt) and its records (NAME.jsonl, or junit XML of the
# tests). The status is 0 if every step ran; goals that are missed say FAIL in the output.
set -u
out=${1:?usage: all.sh OUT}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
failed=

step() { # NAME SECONDS COMMAND...
    name=$1 seconds=$2
    shift 2
    echo "== $name: $*"
    timeout "$seconds" "$@" > "$out/$name.txt" 2>&1
    status=$?
    tail -n "${LINES_SHOWN:-60}" "$out/$name.txt"
    [ "$status" -eq 0 ] || failed="$failed $name($status)"
}

nvidia-smi > "$out/nvidia-smi.txt" 2>&1
"$python" -c 'import blockflash, json; print(json.dumps(blockflash.info(), indent=1))' \
    > "$out/info.json" || exit 1
export BLOCKFLASH_REQUIRE_GPU=1
grid=tests/test_flash_attn_grid.py
# The grid is bound by the host: several processes share the GPU where pytest-xdist is installed.
processes=
"$python" -c 'import xdist' 2> /dev/null && processes="-n 6"

step tests 300 "$python" -m pytest -m gpu -q -ra --durations 8 --maxfail 40 \
    --ignore "$grid" --junit-xml "$out/tests.xml" tests
step host_time 60 "$python" benches/host_time.py --out "$out/host_time.jsonl"
step prefill 120 "$python" benches/prefill.py --out "$out/prefill.jsonl"
step sparse_linear 90 "$python" benches/sparse_linear.py --out "$out/sparse_linear.jsonl"
step distributed 150 "$python" benches/distributed.py --out "$out/distributed.jsonl"
# shellcheck disable=SC2086 # two words or none
step grid 240 "$python" -m pytest -m gpu -q -ra --maxfail 40 $processes \
    --junit-xml "$out/grid.xml" "$grid"

grep -h '^FAIL' "$out"/*.txt
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
