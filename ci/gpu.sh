#!/usr/bin/env bash
# Everything that needs a GPU, in one command: tests, digest, faults, verify, degrees, backward-degrees,
# training, peers, forward, bench, sanitize; and backward, endurance, backward-endurance and recording,
# which do not fit the time and run only when they are named.
#
#   bash ci/gpu.sh                                  all parts on one GPU, within 8 minutes on an H200
#   bash ci/gpu.sh --at-once 1 --seconds 1500 --limit tests=400 --limit peers=600    with few cores
#   bash ci/gpu.sh --parts verify,digest --out out  some of them
#   bash ci/gpu.sh --ranks 2 --parts verify,bench   two ranks on two GPUs
#   bash ci/gpu.sh --ranks 8 --parts tests --seconds 590    the tests of groups of eight GPUs
#   bash ci/gpu.sh --parts forward --seconds 300    the forward's speed takes all the time there is
#   bash ci/gpu.sh --parts backward --seconds 300   the backward's likewise
#   bash ci/gpu.sh --parts endurance                10,000 forwards under load
#   bash ci/gpu.sh --parts backward-endurance       10,000 backwards
#   bash ci/gpu.sh --parts recording                what verify.record costs a training step
#   bash ci/gpu.sh --ranks 2 --parts training       two ranks that train a small transformer
#   bash ci/gpu.sh --commit SHA                     a copy of a tree says of which commit
#
# Writes DIR/run.json (environment, commit, digests of the sources as they are, outcome and documents
# of every part) and DIR/PART.log. `ci/gpu/evidence.py collect` refuses another tree than the commit.
# With --ranks N (2, 4 or 8) only what N GPUs do together runs: tests (those of groups of N),
# verify, training, peers, forward, bench, and backward when it is named; their times grow with N.
# What measures time or joules runs alone, after the rest, of which several steps run at once.
# A part that fails or takes too long is reported, and the others still run. Exit code 0: all parts
# passed; 1: one failed; 2: usage, or a dirty tree without --allow-dirty; 3: none failed, but one
# could not run here. `--help` prints every option. Environment: PYTHON, the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# The kernels are what is measured, with a group too.
export MOK_HOPPER_BACKWARD="${MOK_HOPPER_BACKWARD:-1}"
# NVLink multicast is left off: nothing here needs it, and sums inside the switch have an order that
# nobody states.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
exec "$python" ci/gpu/parts.py "$@"
