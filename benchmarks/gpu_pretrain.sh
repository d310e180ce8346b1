#!/usr/bin/env bash
# Trains experiment=swissprot_gpu for nine minutes, unattended; the same command continues the run.
#
#   benchmarks/gpu_pretrain.sh ATTENTION DATA VALID RUN [SETTINGS OF TRAIN]
#   STEPS=16000 benchmarks/gpu_pretrain.sh performer_relu data/swissprot data/valid runs/relu
#
# DATA and VALID are prepared data sets. Two mechanisms in two commands each make a pair of models.
# STEPS is the length of the whole run (8,000): the learning rate falls over its last 40 %, so choose
# it after the first command by the rate that it prints. LIMIT is in seconds (530), PYTHON the
# interpreter. Ends with 0 when the run is complete, and with 75 when it has to be continued.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 4 ] || { sed -n '4,5s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
attention=$1 data=$2 valid=$3 run=$4
shift 4
export PYTHONPATH="$PWD:$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}"

# timeout sends SIGTERM, after which a run saves a checkpoint and ends with 75.
exec timeout --preserve-status --signal=TERM --kill-after=60 "${LIMIT:-530}" \
  "${PYTHON:-python3}" -m protlm.train experiment=swissprot_gpu "attention=$attention" \
  "data.dir=$data" "data.valid_dir=$valid" "run_dir=$run" "trainer.max_steps=${STEPS:-8000}" "$@"
