#!/usr/bin/env bash
# One node:            examples/cluster/torchrun.sh examples/zero_auto.py
# Two nodes, on each:  NODES=2 MASTER=node0:29400 examples/cluster/torchrun.sh examples/zero_auto.py
#
# Started again after a failure it goes on from the newest complete checkpoint. RESTARTS says how often that is done:
# from outside, with a new torchrun each time. torchrun's own --max-restarts keeps the agents alive and works too, with
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (see docs/elastic.md).
set -uo pipefail

PROCESSES=${PROCESSES:-$(nvidia-smi -L 2>/dev/null | grep -c . || true)}
[ "${PROCESSES}" -gt 0 ] || PROCESSES=2
NODES=${NODES:-1}
if [ "$NODES" -gt 1 ]; then
  rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="${MASTER:?on two nodes and more: MASTER=host:port of one of them}" --rdzv-id="${JOB:-fasttrain}")
else
  rendezvous=(--standalone)
fi

for attempt in $(seq 0 "${RESTARTS:-3}"); do
  torchrun --nnodes="$NODES" --nproc-per-node="$PROCESSES" "${rendezvous[@]}" "$@" --devices "$PROCESSES" --nodes "$NODES"
  status=$?
  case $status in
    0) exit 0 ;;
    130 | 143) exit $status ;; # interrupted, or preempted with a checkpoint: whoever asked for it starts it again
  esac
  echo "attempt $attempt ended with $status" >&2
  sleep "${PAUSE:-10}"
done
exit "$status"
