#!/bin/sh
# Written by `cargo xtask bundle`. Tests and then measures this machine's GPU.
# usage: ./run-all [FOLDER]                     results go to FOLDER (default: out)
#        SUITES="attention_floor" ./run-all     measures these suites, SUITES=none none
#        TESTS=none ./run-all                   tests nothing
#        SEEDS="57 58" ./run-all               also measures the shapes that these seeds draw, of
#                                               all operations; for a record seeds that are new
#        OPTIONS="--peers none" ./run-all       is passed on to `blockflash bench`; with
#                                               "--missing --minutes 3" a later call goes on
#        CASES=none ./run-all                   measures no attention over several GPUs; else these
#                                               cases of several_gpus, if there are two GPUs or more
#        SANITIZE=1 ./run-all                   also runs memcheck and racecheck on cases of each
#                                               kernel, and memcheck on what hostile programs do
set -u
mkdir -p "${1:-out}" || exit 1
out=$(cd "${1:-out}" && pwd) || exit 1
cd "$(dirname "$0")" || exit 1
failed=""

query=name,driver_version,clocks.max.sm,clocks.max.mem,memory.total
nvidia-smi --query-gpu=$query --format=csv | tee "$out/gpu.txt"
./blockflash info | tee "$out/info.txt" || failed="$failed info"

# The driver then ignores machine code that has no PTX beside it in a fat binary. Ours is in none.
CUDA_FORCE_PTX_JIT=1 ./blockflash attention --random 1x512x4x64 --mask causal --check \
  >"$out/forced_ptx.txt" || failed="$failed forced_ptx"

if [ "${TESTS:-all}" != none ]; then
  export BLOCKFLASH_REQUIRE_GPU=1 BLOCKFLASH_GPU_RECORD="$out/gpu-passed.jsonl"
  : >"$BLOCKFLASH_GPU_RECORD"
  for program in tests/*; do
    name=$(basename "$program")
    echo "== $name"
    if "$program" >"$out/$name.log" 2>&1; then
      grep '^test result' "$out/$name.log"
    else
      failed="$failed $name"
      tail -n 40 "$out/$name.log"
    fi
  done
fi

if python3 -c 'import torch, safetensors' 2>/dev/null; then
  echo "== a layer compared with torch"
  python3 examples/compare_with_torch.py ./blockflash >"$out/compare_with_torch.txt" ||
    failed="$failed compare_with_torch"
  cat "$out/compare_with_torch.txt"
fi

if [ -n "${SANITIZE:-}" ]; then
  while read -r arguments; do
    for tool in memcheck racecheck; do
      echo "== $tool: blockflash $arguments"
      # shellcheck disable=SC2086 # several words
      compute-sanitizer --tool "$tool" --error-exitcode 9 \
        ./blockflash $arguments --check >"$out/$tool.log" 2>&1 ||
        { failed="$failed $tool"; tail -n 40 "$out/$tool.log"; }
    done
  done <<END
attention --random 1x200x4x64 --kv-heads 2 --mask causal --dtype bf16
attention --random 2x131x2x128 --seqlen-kv 257 --window 70,- --softcap 20
attention --random 1x130x1x256 --mask causal --dtype bf16
attention --random 1x130x2x512 --kv-heads 1 --mask causal --dtype bf16
attention-decode --random 2x3x4x512 --kv-heads 1 --seqlen-kv 300
bsr-matmul --random 200x130x333 --block 16 --density 0.3 --bias random --activation gelu
bsr-matmul --random 200x300x333 --block 32 --density 0.3 --dtype bf16
bsr-matmul --random 300x257x400 --block 64 --density 0.3 --activation silu
bsr-matmul --random 300x128x400 --block 128 --density 0.5 --out-dtype f32
bsr-matmul --random 2100x2000x600 --block 16 --density 0.1
bsr-matmul --random 2100x2000x600 --block 32 --density 0.2 --dtype bf16
bsr-matmul --random 304x264x400 --block 64 --density 0.3 --activation silu --bias random
bsr-matmul --random 256x128x8192 --block 16 --density 0.5
bsr-matmul --random 256x128x8192 --block 128 --density 0.9
bsr-matmul --random 304x264x400 --block 64 --density 0.3 --transpose-a --c-layout column
bsr-matmul --random 304x264x400 --block 128 --density 0.5 --transpose-a --b-layout column
sddmm --random 304x200x264 --block 64 --density 0.4 --a-layout column
sddmm --random 304x200x264 --block 128 --density 0.5 --b-layout column --dtype bf16
END
  for name in garbage_gpu hostile_gpu; do
    echo "== memcheck: $name"
    BLOCKFLASH_REQUIRE_GPU=1 BLOCKFLASH_FUZZ_CASES=500 \
      compute-sanitizer --tool memcheck --error-exitcode 9 \
      "tests/$name" --nocapture >"$out/memcheck.$name.log" 2>&1 ||
      { failed="$failed memcheck:$name"; tail -n 40 "$out/memcheck.$name.log"; }
  done
fi

gpus=$(nvidia-smi -L | wc -l)
if [ "${CASES:-all}" != none ] && [ "$gpus" -ge 2 ]; then
  nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null)
  export LD_LIBRARY_PATH="${nccl:+$nccl:}${LD_LIBRARY_PATH:-}" NCCL_NVLS_ENABLE=0
  cases="s32768_h32 s131072_h32 s262144_h8 s131072_h32kv8 bwd_s32768_h32 bwd_s131072_h32"
  cases=${CASES:-$cases s1048576_h8_top128}
  for work in check "$cases" lost; do
    echo "== several_gpus: $work"
    # shellcheck disable=SC2086 # several words
    timeout 300 ./several_gpus --gpus "$gpus" --out "$out/several_gpus" $work \
      >>"$out/several_gpus.txt" 2>&1 || failed="$failed several_gpus"
    grep '^s[0-9]\|^bwd\|^rank' "$out/several_gpus.txt" | tail -n 14
  done
fi

for file in benches/suites/*.toml; do
  suite=$(basename "$file" .toml)
  [ "$suite" != selection ] || continue # for GPUs that nobody has measured
  case " ${SUITES:-$suite} " in
  *" $suite "*)
    echo "== $suite"
    # shellcheck disable=SC2086 # OPTIONS holds several words
    ./blockflash bench "$suite" --out "$out/$suite.jsonl" ${OPTIONS:-} || failed="$failed $suite"
    ;;
  esac
done

for seed in ${SEEDS:-}; do
  echo "== drawn, seed $seed"
  # shellcheck disable=SC2086 # OPTIONS holds several words
  ./blockflash bench drawn --seed "$seed" --out "$out/drawn_$seed.jsonl" ${OPTIONS:-} ||
    failed="$failed drawn_$seed"
done

if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
echo "all passed; results are in $out"
