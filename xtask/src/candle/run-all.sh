#!/bin/sh
# Written by `cargo xtask candle --bundle`. Runs the tests of blockflash-candle on this machine's
# GPU, and the example.
# usage: ./run-all [FOLDER]    results go to FOLDER (default: out)
# The libraries of CUDA 13 are looked for where the system has them, in /usr/local/cuda and among
# the Python packages (those that PyTorch brings).
set -u
mkdir -p "${1:-out}" || exit 1
out=$(cd "${1:-out}" && pwd) || exit 1
cd "$(dirname "$0")" || exit 1
model=$(mktemp -d -p "${TMPDIR:-/tmp}") || exit 1
trap 'rm -rf "$model"' EXIT
failed=""

packages=$(python3 -c 'import site; print(*site.getsitepackages())' 2>/dev/null)
for folder in /usr/local/cuda $(for of in $packages; do echo "$of"/nvidia/*; done); do
  for lib in "$folder/lib64" "$folder/lib"; do
    [ -d "$lib" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib"
  done
done
export LD_LIBRARY_PATH

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv | tee "$out/gpu.txt"
echo "== tests"
if BLOCKFLASH_REQUIRE_GPU=1 ./tensors >"$out/tests.txt" 2>&1; then
  grep '^test result' "$out/tests.txt"
else
  failed="$failed tests"
  tail -n 60 "$out/tests.txt"
fi

llama() {
  name=$1
  shift
  echo "== llama $*"
  ./llama "$model" --device cuda --rounds 3 "$@" >"$out/$name.txt" 2>"$out/$name.log" ||
    { failed="$failed $name"; tail -n 5 "$out/$name.log"; }
  cat "$out/$name.txt"
}
llama prompt_1000 --make 1b --prompt 1000
llama prompt_8000 --prompt 8000 --sparse
llama prompt_32000 --prompt 32000 --sparse --alone

if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
echo "all passed; results are in $out"
