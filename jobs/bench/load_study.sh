#!/usr/bin/env bash
# Study of loads on one GPU, Llama-3-8B shapes with dummy weights: OUT=folder EVALQ_HOME=folder bash jobs/bench/load_study.sh. About 330 s on an H200.
# Results are packed every 5 s into $OUT/load.tgz (records, samples, logs), so a run that is cut leaves what it had measured.
# MAIN=seconds for the ladder, QUANTS=schemes, LIMIT=seconds in all, POOL=off without the offload cells. The cross-checks: jobs/bench/load_cross_check.py.
began=$(date +%s)
left() { echo $(( ${LIMIT:-330} - ($(date +%s) - began) )); }
pack() { tar czf "$OUT/.load.tmp" -C "$EVALQ_HOME" --exclude '*.parquet' --exclude caches records 2>/dev/null; mv "$OUT/.load.tmp" "$OUT/load.tgz" 2>/dev/null; }
( while sleep 5; do pack; done ) & packer=$!
run() { local most=$1 name=$2; shift 2; local rest; rest=$(left); [ "$rest" -lt 25 ] && { echo "skipped, no time: $name"; return; }
        timeout -k 5 "$(( rest < most ? rest : most ))" "$@" > "$OUT/$name.out" 2> "$OUT/$name.err"; echo "rc=$? $(left) s left: $name"; grep -v "Converting\|warning: the gate" "$OUT/$name.err" | tail -n 9; }
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
only=${CUDA_VISIBLE_DEVICES:+-i $CUDA_VISIBLE_DEVICES}
apps=$(nvidia-smi $only --query-compute-apps=pid,process_name --format=csv,noheader); echo "on the GPU before: ${apps:-nothing}"
shared=false; [ -n "$apps" ] && shared=true
base="+model=llama3-8b engine.load_format=dummy tasks=none tracking=off gpu.memory_utilization=0.6 load.allow_shared=$shared"
ladder="load=ladder load.concurrencies=[10,100,500] load.waves=1 load.requests=20 load.peak_requests=0 load.warmup_requests=64"
run ${MAIN:-215} ladder python3 -m evalq -m $base engine=graphs $ladder +quant=${QUANTS:-fp8-weights-kv,fp8-kv,fp8-weights}
if [ "${POOL:-on}" = on ]; then
# A pool made small: 3 GiB hold 24,576 tokens, 40 requests of 600.
small="load=ladder load.concurrencies=[100] load.waves=1 load.requests=100 load.peak_requests=0 engine.extra.kv_cache_memory_bytes=3221225472"
run 60 pool-small python3 -m evalq $base +quant=baseline engine=graphs $small
run 60 pool-small-offload python3 -m evalq $base +quant=baseline engine=cpu-offload $small engine.extra.kv_offloading_size=16 'engine.extra.compilation_config={mode: 0, cudagraph_mode: FULL_DECODE_ONLY}'
fi
kill $packer 2>/dev/null; pack
timeout 20 python3 jobs/bench/load_study.py $(ls -d "$EVALQ_HOME"/records/*/ | xargs -I{} sh -c 'test -f {}/record.json && echo {}') --title "Loads on one H200: Llama-3-8B shapes" --out $OUT/load-study.md > /dev/null; head -c 9500 $OUT/load-study.md
tail -n 12 "$EVALQ_HOME"/records/.work/*/engine.log 2>/dev/null | tail -c 2000
