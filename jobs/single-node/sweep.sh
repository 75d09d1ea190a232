#!/bin/bash
# A sweep on one machine, started again for as long as it dies of something other than its cells: power, a kill, a lost session.
#
#   nohup jobs/single-node/sweep.sh +experiment=llama3-on-h200 >sweep.log 2>&1 &
#   evalq status
#
# Cost and duration: what `evalq sweep ... --dry-run` says. One cell per GPU runs at once; each has its GPU to itself.
# Ends with the sweep's own exit code: 0 pass, 1 quality fail, 2 usage, 3 inconclusive, 4 infeasible, 5 some cell could not be measured.
#   EVALQ_HOME   the store (default: runs in this project)
#   EVALQ_TRIES  starts at most (default: 5)
set -uo pipefail

tries=${EVALQ_TRIES:-5}
code=1
for try in $(seq "$tries"); do
    evalq sweep "$@"
    code=$?
    # 130 and up: it was stopped or killed, which says nothing about a cell. Everything below is an answer.
    [ "$code" -lt 130 ] && exit "$code"
    [ "$code" -eq 130 ] && [ -t 0 ] && exit "$code" # Ctrl-C at a terminal is meant
    echo "sweep.sh: start $try of $tries ended with $code; going on with what is missing" >&2
    sleep "${EVALQ_PAUSE_SECONDS:-10}"
done
exit "$code"
