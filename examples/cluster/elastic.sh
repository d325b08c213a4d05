#!/usr/bin/env bash
# RESTARTS=99 examples/cluster/elastic.sh
#
# One node: starts examples/cluster/elastic.py on all its GPUs, and again after a failure, on those that are there then.
# From outside, with a new torchrun each time, so that the number of workers may change.
set -uo pipefail

for attempt in $(seq 0 "${RESTARTS:-3}"); do
  workers=${PROCESSES:-$(nvidia-smi -L 2>/dev/null | grep -c . || true)}
  [ "$workers" -gt 0 ] || workers=2
  torchrun --standalone --nproc-per-node="$workers" examples/cluster/elastic.py "$@"
  status=$?
  case $status in
    0) exit 0 ;;
    130 | 143) exit $status ;; # interrupted
  esac
  echo "attempt $attempt on $workers workers ended with $status" >&2
  sleep "${PAUSE:-10}"
done
exit "$status"
