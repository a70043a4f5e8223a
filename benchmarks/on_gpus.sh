#!/usr/bin/env bash
# The heads, SGLang beside them, and the speed of training, on one machine with one GPU or more. Its parts have run on one
# to four H200; the whole has not.
#
#   benchmarks/on_gpus.sh OUT TARGET PROMPTS [REFERENCE_HEAD]
#
# PROMPTS holds train.jsonl, heldout.jsonl and eval/*.jsonl. SERVE names a file with more overrides of serve.py, one a line,
# e.g. launch.env and launch.extra_flags. Each step has a log in OUT and a line with its exit status in OUT/steps.log;
# steps that failed do not stop the others, and what is complete is not done again. With several GPUs the last one is kept
# for what is timed.
set -u
cd "$(dirname "$0")/.." && mkdir -p "$1" && OUT=$(realpath "$1") TARGET=$2 PROMPTS=$3 REFERENCE=${4:-}
GPUS=$(nvidia-smi --list-gpus | wc -l)
LAST=$((GPUS - 1)) BUSY=$((GPUS > 1 ? GPUS - 2 : 0)) # those up to BUSY train heads
SERVING=() && [ -n "${SERVE:-}" ] && mapfile -t SERVING <"$SERVE"
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

step() { # GPUs, seconds at most, name, command …
    local gpus=$1 limit=$2 name=$3 && shift 3
    CUDA_VISIBLE_DEVICES=$gpus timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$? $name, $(date +%T)" >>"$OUT/steps.log"
}
shared() { # the same, for many small processes on a GPU: without MPS they would take turns
    CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps step "$@"
}
until_there() { # a file, or the end of a process
    until [ -f "$1" ] || ! kill -0 "$2" 2>/dev/null; do sleep 1; done
}
mkdir -p "$OUT/mps" && CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps nvidia-cuda-mps-control -d

QUALITY=$OUT/head_quality HEAD=$OUT/head_quality/heads/more_data__all_rows
shared "$(seq -s, 0 $BUSY)" 1500 head_quality "$PYTHON" benchmarks/head_quality.py --out "$QUALITY" --target "$TARGET" \
    --prompts "$PROMPTS/train.jsonl" --held-out "$PROMPTS/heldout.jsonl" --questions "$PROMPTS"/eval/{mt_bench,gsm8k}.jsonl \
    ${REFERENCE:+--reference "$REFERENCE"} --jobs 6 --gpus $(seq 0 $BUSY) -- trainer=gpu data.verify=false &
TRAINING=$!
step "" 300 store_8b "$PYTHON" benchmarks/synthetic_store.py --out "$OUT/store_8b" --gigabytes 40 &
step "" 200 store_70b "$PYTHON" benchmarks/synthetic_store.py --out "$OUT/store_70b" --gigabytes 3 --shape 70b --tokens 512 &
STORES=$!
[ $GPUS -gt 1 ] || wait $TRAINING # what follows is timed
step $LAST 300 train_step "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step.json"
step $LAST 150 train_step_fp8 "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step_fp8.json" --case 0 --case 1 \
    kernels.fp8=true
for channels in 128 64; do
    step $LAST 150 attention_$channels "$PYTHON" benchmarks/attention.py --out "$OUT/attention_$channels.json" --channels $channels
done
step $LAST 300 gpu_tests "$PYTHON" -m pytest -q -m gpu tests --timeout 100

until_there "$QUALITY/rows/more_data__all_rows.json" $TRAINING
for shape in "chain of 3" "tree 5/4/16" "tree 4/8/24"; do
    step $LAST 300 "parity_${shape//[ \/]/_}" "$PYTHON" benchmarks/sglang_parity.py --serve-only --only "$shape" --out "$OUT/parity" \
        target.path="$TARGET" head="$HEAD" prompts.path="$PROMPTS/heldout.jsonl" limit=200 "${SERVING[@]}"
done
# A server of the small target waits for its scheduler: timed are target and best head at 8 B's size, with the same numbers.
BEST=8_answers_to_each_prompt__1_epoch__weight_decay_0_1__Muon
until_there "$QUALITY/rows/$BEST.json" $TRAINING
step $LAST 300 enlarge "$PYTHON" benchmarks/enlarge.py "$TARGET" "$QUALITY/heads/$BEST" "$OUT/larger" --times 16 --intermediate 16384 --layers 20
LARGER=(target.path="$OUT/larger/target" head="$OUT/larger/head" "${SERVING[@]}")
step $LAST 600 bench "$PYTHON" serve.py action=bench "${LARGER[@]}" topk=4 steps=5 draft_tokens=16 hydra.run.dir="$OUT/bench" \
    "bench.prompts={held_out: $PROMPTS/heldout.jsonl, mt_bench: $PROMPTS/eval/mt_bench.jsonl}" limit=16 \
    bench.requests_per_place=2
step $LAST 500 tune "$PYTHON" serve.py action=tune "${LARGER[@]}" target.dtype=bfloat16 prompts.path="$PROMPTS/train.jsonl" \
    limit=24 tune.timed=3 tune.requests_per_place=2 hydra.run.dir="$OUT/tune"

wait $TRAINING $STORES
shared "$(seq -s, 0 $LAST)" 600 trajectories "$PYTHON" benchmarks/trajectories.py --out "$OUT/trajectories" --jobs $((6 * GPUS)) \
    --data "$QUALITY/stores/sampled_at_0.7/features" --gpus $(seq 0 $LAST) -- experiment=head_quality data.verify=false \
    data.pack_tokens=8192 # halves must hold the longest sample
step "$(seq -s, 0 $LAST)" 400 end_to_end "$PYTHON" benchmarks/end_to_end.py --store "$OUT/store_8b" --out "$OUT/end_to_end.json" \
    --steps 100 --devices $(for devices in 1 2 4; do [ $devices -gt $GPUS ] || echo $devices; done)
for strategy in ddp fsdp; do
    [ $GPUS -ge 2 ] && step 0,1 200 wide_$strategy "$PYTHON" train.py trainer=$strategy trainer.devices=2 \
        data.path="$OUT/store_70b" data.pack_tokens=4096 trainer.max_epochs=1 trainer.log_every_n_steps=1 data.verify=false \
        hydra.run.dir="$OUT/wide_$strategy"
done
cat "$OUT/steps.log"
