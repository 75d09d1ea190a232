#!/usr/bin/env bash
# Calibrated checkpoints of one small model made and scored side by side on one GPU, then their table:
#   OUT=folder EVALQ_HOME=folder EVALQ_DATA=folder bash jobs/bench/calibrated.sh
# SCHEMES, METHODS: which (default: mixed-4-8 w4a16, rtn gptq awq autoround); LIMIT: seconds in all (default 500); ITERS: iterations of
# autoround (default 50). Nothing here is timed, so the cells share the GPU on purpose; each has its own lock on it.
set -u
began=$SECONDS
left() { echo $((${LIMIT:-500} - (SECONDS - began))); }
mkdir -p "$OUT"
common="+model=smollm2-135m data=local tasks=perplexity load=off engine=eager gpu.memory_utilization=0.06 gate.required_tasks=[wikitext] tracking=off calibration=articles"
pool="engine.extra={kv_cache_memory_bytes:2147483648}" # given, so that no engine looks at what the others hold
cell() { # scheme method
  local name=$2.$1 options=()
  [ "$2" = autoround ] && options=("calibration.options={iters:${ITERS:-50}}")
  EVALQ_LEASES=$EVALQ_HOME/leases-$name timeout -s INT "$(left)" python3 -m evalq $common "$pool" "+quant=$1" "quant.method=$2" "${options[@]}" > "$OUT/$name.out" 2> "$OUT/$name.err"
  echo "$name ended with $? after $((SECONDS - began)) s"
}
timeout -s INT "$(left)" python3 -m evalq $common "$pool" +quant=baseline > "$OUT/baseline.out" 2> "$OUT/baseline.err"
echo "baseline ended with $? after $((SECONDS - began)) s"
for scheme in ${SCHEMES:-mixed-4-8 w4a16}; do for method in ${METHODS:-rtn gptq awq autoround}; do cell "$scheme" "$method" & done; done
wait
python3 jobs/bench/calibrated.py "$EVALQ_HOME/records" | tee "$OUT/calibrated.md"
