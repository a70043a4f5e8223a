#!/usr/bin/env bash
# The heads, SGLang beside them, and the speed of training, on one machine with one GPU or more. Not run as a whole yet.
#
#   benchmarks/on_gpus.sh OUT TARGET PROMPTS [REFERENCE_HEAD]
#
# PROMPTS holds train.jsonl, heldout.jsonl and eval/*.jsonl. SERVE names a file with more overrides of serve.py, one a line,
# e.g. launch.env and launch.extra_flags. Each step has a log in OUT and a line with its exit status in OUT/steps.log;
# steps that failed do not stop the others, and what is complete is not done again.
set -u
cd "$(dirname "$0")/.." && mkdir -p "$1" && OUT=$(realpath "$1") TARGET=$2 PROMPTS=$3 REFERENCE=${4:-}
GPUS=$(nvidia-smi --list-gpus | wc -l) FIRST=0 LAST=$(($(nvidia-smi --list-gpus | wc -l) - 1))
SERVING=() && [ -n "${SERVE:-}" ] && mapfile -t SERVING <"$SERVE"
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

step() { # GPUs, seconds at most, name, command …
    local gpus=$1 limit=$2 name=$3 && shift 3
    CUDA_VISIBLE_DEVICES=$gpus timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$(date +%T) $name: $?" >>"$OUT/steps.log"
}
shared() { # the same, for many small processes on a GPU: without MPS they would take turns
    CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps step "$@"
}
mkdir -p "$OUT/mps" && CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps nvidia-cuda-mps-control -d

QUALITY=$OUT/head_quality HEAD=$OUT/head_quality/heads/more_data__all_rows
shared "$(seq -s, 0 $LAST)" 1500 head_quality "$PYTHON" benchmarks/head_quality.py --out "$QUALITY" --target "$TARGET" \
    --prompts "$PROMPTS/train.jsonl" --held-out "$PROMPTS/heldout.jsonl" --questions "$PROMPTS"/eval/{mt_bench,gsm8k}.jsonl \
    ${REFERENCE:+--reference "$REFERENCE"} --jobs $((16 / GPUS)) --gpus $(seq 0 $LAST) -- trainer=gpu data.verify=false &
TRAINING=$!
step $LAST 200 gpu_tests "$PYTHON" -m pytest -q -m gpu tests --timeout 100
step $LAST 300 store_8b "$PYTHON" benchmarks/synthetic_store.py --out "$OUT/store_8b" --gigabytes 24
step $LAST 100 store_70b "$PYTHON" benchmarks/synthetic_store.py --out "$OUT/store_70b" --gigabytes 3 --shape 70b

until [ -f "$HEAD/training.json" ] || ! kill -0 $TRAINING 2>/dev/null; do sleep 1; done
served() { # GPU, port, shape of the draft
    step "$1" 300 "parity_$2" "$PYTHON" benchmarks/sglang_parity.py --serve-only --only "$3" --out "$OUT/parity" \
        target.path="$TARGET" head="$HEAD" prompts.path="$PROMPTS/heldout.jsonl" limit=200 launch.port="$2" "${SERVING[@]}"
}
served $FIRST 30100 "chain of 3" & CHAIN=$!
served $LAST 30200 "tree 5/4/16" & TREE=$!
until ! pgrep -f experiment=head_quality >/dev/null; do sleep 1; done
wait $CHAIN $TREE
shared "$(seq -s, 0 $LAST)" 300 trajectories "$PYTHON" benchmarks/trajectories.py --out "$OUT/trajectories" --jobs 12 \
    --data "$QUALITY/stores/sampled_at_0.7/features" --gpus $(seq 0 $LAST) -- experiment=head_quality data.verify=false

# From here on times are measured: one step on a GPU.
FAST=(attention=torch_flash layer=fused loss=chunked)
step $FIRST 300 train_step "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step.json" "${FAST[@]}"
step $FIRST 120 train_step_fp8 "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step_fp8.json" --case 0 --case 1 --case 2 \
    attention=torch_flash layer=fused_fp8 loss=chunked_fp8
step $FIRST 200 attention "$PYTHON" benchmarks/attention.py --out "$OUT/attention.json"
step $FIRST 200 train_step_triton "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step_triton.json" --case 0 --case 1 \
    --case 2 attention=triton layer=fused
step $FIRST 100 end_to_end "$PYTHON" train.py trainer=gpu data.path="$OUT/store_8b" data.pack_tokens=16384 trainer.max_steps=90 \
    data.verify=false hydra.run.dir="$OUT/end_to_end"
step $FIRST 300 bench "$PYTHON" serve.py action=bench target.path="$TARGET" head="$HEAD" hydra.run.dir="$OUT/bench" \
    "bench.prompts={held_out: $PROMPTS/heldout.jsonl, mt_bench: $PROMPTS/eval/mt_bench.jsonl}" bench.limit=40 \
    'bench.concurrency=[1,8,32]' bench.requests_per_place=2 launch.port=30300 "${SERVING[@]}"
step $FIRST 400 tune "$PYTHON" serve.py action=tune target.path="$TARGET" head="$HEAD" prompts.path="$PROMPTS/train.jsonl" \
    tune.limit=24 tune.timed=2 launch.port=30400 hydra.run.dir="$OUT/tune" "${SERVING[@]}"
for devices in 2 4; do
    [ $GPUS -ge $devices ] && step "$(seq -s, 0 $((devices - 1)))" 100 ddp_$devices "$PYTHON" train.py trainer=ddp \
        trainer.devices=$devices data.path="$OUT/store_8b" data.pack_tokens=16384 trainer.max_steps=45 data.verify=false \
        hydra.run.dir="$OUT/ddp_$devices"
done
for strategy in ddp fsdp; do
    [ $GPUS -ge 2 ] && step 0,1 100 wide_$strategy "$PYTHON" train.py trainer=$strategy trainer.devices=2 \
        data.path="$OUT/store_70b" data.pack_tokens=4096 trainer.max_steps=6 trainer.log_every_n_steps=1 data.verify=false \
        hydra.run.dir="$OUT/wide_$strategy"
done
cat "$OUT/steps.log"
