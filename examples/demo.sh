#!/bin/sh
# The main job on examples/, from a config to a run: lint, estimate, tune, launch. Called by `make demo`.
set -u
out=${DEMO_OUT:-demo_out}
small="--set layers=6 --set width=320 --set heads=5 --set vocab=8000 --set positions=128"

# run EXPECTED_EXIT COMMAND...: print the command, run it, stop the demo at any other exit code
run() {
    expected=$1
    shift
    printf '\n\n$ %s\n' "$*"
    "$@"
    code=$?
    if [ "$code" -ne "$expected" ]; then
        printf 'demo: exit code %s, expected %s: %s\n' "$code" "$expected" "$*" >&2
        exit 1
    fi
}

run 1 dsplan lint examples/faulty/ds_config.json --cluster 2
run 0 dsplan lint examples/ds_config.json --cluster 2
run 0 dsplan estimate examples/simple_model.py
run 0 dsplan estimate examples/gpt.py --cluster 8xA100-40GB
run 0 dsplan estimate examples/llama3_8b/config.json --cluster 8xH100-80GB
# shellcheck disable=SC2086
run 0 dsplan tune examples/gpt.py $small --seq-len 128 --config examples/ds_config.json --cluster 2xA100-40GB -o "$out"
run 0 dsplan lint "$out/ds_config.json" --cluster 2
micro_batch=$(python -c "import json; print(json.load(open('$out/plan.json'))['micro_batch'])")
run 0 dsplan launch -o "$out" "$out/plan.json" examples/train_gpt.py --steps 4 --micro-batch "$micro_batch"
