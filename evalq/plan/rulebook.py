"""The rules as a table: id, severity, what is demanded, remedy, source. The checks are in the rules_* modules.

"Article A" is "KV-cache optimisation and FP8 quantisation for large Transformer models" (MI325X, vLLM), "article B"
is "Meta Llama 3 inference optimisation: from quantisation to the KV cache" (A100, vLLM). What an article demands of
its own platform is an error there; where today's engine no longer insists on it, the source says so.
"""

from __future__ import annotations

from evalq.plan.violation import Rule

A = "article A"
B = "article B"
VLLM = "vLLM 0.32"

_ROWS = (
    # Shapes and parallelism
    Rule("tp-heads", "error", "tensor parallelism divides the attention heads",
         "choose a tensor_parallel_size that divides the heads", f"{VLLM}, ModelConfig.verify_with_parallel_config"),
    Rule("tp-kv-heads", "error", "KV heads and GPUs divide one another",
         "choose a tensor_parallel_size that divides the KV heads or is a multiple of them",
         f"{VLLM}, the models' attention layers"),
    Rule("kv-replicated", "warning", "no more GPUs than KV heads",
         "use fewer GPUs per tensor-parallel group, or pipeline parallelism", "arithmetic: a KV head cannot be split"),
    Rule("pp-layers", "error", "at least one layer per pipeline stage",
         "lower pipeline_parallel_size", f"{VLLM}, get_pp_indices"),
    Rule("ep-experts", "error", "expert parallelism divides the experts and needs experts",
         "leave enable_expert_parallel out or choose a tensor_parallel_size that divides the experts",
         f"{VLLM}, ModelConfig.verify_with_parallel_config"),
    Rule("gpu-count", "error", "as many GPUs as tensor x pipeline parallelism asks for",
         "raise gpu.count or lower the parallelism", "arithmetic"),
    Rule("group-divides", "error", "the group size divides the input features on each GPU",
         "use a smaller group_size or fewer GPUs", "compressed-tensors 0.17 and vLLM 0.32, CompressedTensorsWNA16"),
    Rule("pack-divides", "error", "packed weights fill whole 32-bit words on each GPU",
         "use fewer GPUs, or another number of bits", "compressed-tensors 0.17, packed layout"),
    Rule("block-divides", "error", "FP8 blocks divide the layer's shape on each GPU",
         "use a tensor_parallel_size whose share of the layer is a multiple of the block, or per-channel FP8",
         f"{VLLM}, validate_fp8_block_shape"),
    Rule("target-unmatched", "error", "every target of a scheme matches a layer",
         "correct the target, or choose a scheme made for this kind of model", "evalq: a scheme does what it says"),
    Rule("vision-16-bit", "error", "the vision encoder stays at 16 bit",
         "add a pattern for the vision layers to quant.ignore", f"{A} (the vision encoder has no FP8); {VLLM}"),
    Rule("quantised-already", "error", "a scheme is made from 16-bit weights",
         "use quant=baseline or fp8-kv, which take the published weights, or give a 16-bit copy as model.path",
         f"{VLLM}, ModelConfig._verify_quantization; rounding twice is another scheme"),
    # What the device can do
    Rule("fp8-weights-device", "error", "FP8 weights need FP8 matrix units",
         "use w4a16 or int8-w8a8; FP8 as storage only (weights unpacked to 16 bit) would be another scheme",
         "compute capability 8.9, gfx942 or newer: NVIDIA CUDA guide, table of arithmetic; vLLM 0.32, Fp8 schemes"),
    Rule("fp8-kv-device", "error", "an E4M3 KV cache needs kernels that read it",
         "use kv_cache_dtype bfloat16, or fp8_e5m2 where the backend has it",
         f"{A} says Ampere; Triton cannot convert E4M3 below compute capability 8.9 ({VLLM}, triton_attn)"),
    Rule("int8-device", "error", "W8A8 int8 needs int8 matrix products",
         "use fp8-weights", "NVIDIA Blackwell: CUTLASS int8 kernels stop at compute capability 9.0"),
    Rule("mxfp4-device", "error", "MXFP4 needs a device with MXFP4 units",
         "use a GPU with MXFP4 (MI355X, B200), or another checkpoint; AITER MLA off where it asks for MXFP4",
         f"{A}: CDNA3 has no MXFP4"),
    Rule("capability", "error", "the device has what the scheme needs",
         "choose another scheme or GPU", "evalq.facts.gpus"),
    Rule("w8a16-cpu", "error", "the CPU engine has no kernel for 8-bit weights with 16-bit activations",
         "give the group int8 input_activations (W8A8)", f"seen on the CPU build of {VLLM}"),
    Rule("cpu-tp", "error", "the CPU engine runs in one process here",
         "set engine.tensor_parallel_size=1", "evalq: one pool, one socket"),
    Rule("fp8-cpu-slow", "warning", "FP8 weights run on the CPU through plain PyTorch",
         "use int8-w8a8 for speed; quality figures are valid", f"seen on the CPU build of {VLLM}"),
    # KV formats
    Rule("ds-mla-format", "error", "fp8_ds_mla is the format of sparse latent attention",
         "use kv_cache_dtype fp8_e4m3; where the engine has the packed format it takes it by itself",
         f"{A}; {VLLM}, MLAAttention"),
    Rule("per-head-scales-mla", "error", "per-token-head KV formats belong to grouped-query attention",
         "use kv_cache_dtype fp8_e4m3 or bfloat16", f"{VLLM}, TritonAttentionBackend"),
    Rule("e5m2-fp8-checkpoint", "error", "an E5M2 KV cache does not go with an FP8 checkpoint",
         "use kv_cache_dtype fp8_e4m3", f"{VLLM}, Attention"),
    Rule("fp8-kv-vision", "warning", "no FP8 KV with Qwen3-VL",
         "keep kv_cache_dtype bfloat16, or measure: the cache belongs to the language model alone",
         f"{A}, seen on MI325X (refused there); {VLLM} caches the language model's KV only"),
    # AMD
    Rule("mla-block-size", "error", "latent attention on CDNA3 has blocks of one token",
         "set engine.block_size=1", f"{A}; {VLLM}'s AITER MLA flattens larger blocks to one token itself"),
    Rule("gqa-block-size", "warning", "grouped-query attention on AMD has blocks of 16 tokens",
         "set engine.block_size=16", A),
    Rule("aiter-mla-heads", "error", "AITER's latent attention has at least 16 heads per GPU",
         "use fewer GPUs per group, or VLLM_ROCM_USE_AITER_MLA=0", f"{A}; {VLLM}, AiterMLAHelper pads fewer to 16"),
    Rule("aiter-vskip", "error", "DeepSeek on AMD needs AITER_ENABLE_VSKIP=0",
         "set engine.env.AITER_ENABLE_VSKIP=0", A),
    Rule("aiter-deepseek", "warning", "DeepSeek V3.2 on AMD runs with AITER on",
         "set engine.env.VLLM_ROCM_USE_AITER=1; where MLA misbehaves VLLM_ROCM_USE_AITER_MLA=0", A),
    Rule("aiter-kimi", "error", "Kimi-K2.5 on AMD runs with AITER off",
         "set engine.env.VLLM_ROCM_USE_AITER=0", A),
    Rule("kimi-tp", "warning", "Kimi-K2.5 on AMD runs at TP 4: 16 heads per GPU, and no MXFP4 path",
         "set engine.tensor_parallel_size=4", A),
    Rule("aiter-gemm", "error", "AITER's GEMM has a kernel for the problem",
         "switch AITER's GEMM off for Llama (VLLM_ROCM_USE_AITER_LINEAR=0) or take a newer ROCm; offload is a stop-gap",
         A),
    # KV offload
    Rule("offload-mla", "error", "KV offload to the host is for grouped-query attention",
         "leave kv_offloading_size out", f"{A} (MI325X); {VLLM} offloads MLA blocks elsewhere: a warning there"),
    Rule("offload-size", "warning", "an offload pool of at least 64 GiB",
         "set engine.extra.kv_offloading_size=64 or more", A),
    # Memory
    Rule("weights-fit", "error", "the weights fit", "use more GPUs, a larger one, or a smaller scheme", "arithmetic"),
    Rule("kv-room", "error", "the KV pool holds one request of the engine's maximal length",
         "lower engine.max_model_len, raise gpu.memory_utilization, use more GPUs or an FP8 KV cache",
         f"{VLLM}, _check_enough_kv_cache_memory"),
    Rule("host-memory", "warning", "weights and KV pool within the host's memory, for the CPU engine",
         "lower gpu.cpu_kv_cache_gib, or use a smaller model or scheme",
         "arithmetic; refused above twice the memory that the host shows"),
    Rule("memory-unavailable", "error", "the memory asked for is free when the engine starts",
         "free the GPU of other processes, or lower gpu.memory_utilization", f"{VLLM}, request_memory"),
    Rule("out-of-memory", "error", "a step fits beside weights and KV pool",
         "lower gpu.memory_utilization, max_num_batched_tokens or max_num_seqs", f"{A}; {B}"),
    Rule("utilisation-high", "warning", "gpu.memory_utilization of at most 0.95",
         "lower it to 0.95", f"{A}: above 0.95 out-of-memory errors are likely"),
    Rule("context-length", "error", "max_model_len within the model's positions",
         "lower engine.max_model_len or the tasks' windows", f"{VLLM}, _get_and_verify_max_len"),
    # Scheduler and flags
    Rule("many-seqs", "warning", "max_num_seqs of at most 2,048", "lower engine.max_num_seqs",
         f"{A}: beyond, latency grows"),
    Rule("many-batched-tokens", "warning", "max_num_batched_tokens of at most 65,536",
         "lower engine.max_num_batched_tokens", A),
    Rule("batched-below-length", "error", "without chunked prefill a step holds the longest prompt",
         "raise engine.max_num_batched_tokens or set engine.enable_chunked_prefill=true", f"{VLLM}, SchedulerConfig"),
    Rule("batched-below-seqs", "error", "a step holds one token of each request",
         "raise engine.max_num_batched_tokens or lower engine.max_num_seqs", f"{VLLM}, SchedulerConfig"),
    Rule("retired-flag", "error", "engine arguments that exist", "use what replaced it",
         f"{A}; {B}; {VLLM}, EngineArgs"),
)  # fmt: skip

RULES: dict[str, Rule] = {row.id: row for row in _ROWS}

# argument (as in engine.extra) -> what replaced it
RETIRED_FLAGS: dict[str, str] = {
    "num_scheduler_steps": "nothing: vLLM's V1 scheduler overlaps steps by itself (async scheduling); leave it out",
    "multi_step_stream_outputs": "nothing: it went with num_scheduler_steps; leave it out",
    "swap_space": "nothing: V1 recomputes preempted requests; for host memory use kv_offloading_size",
    "worker_use_ray": "distributed_executor_backend=ray",
    "max_parallel_loading": "max_parallel_loading_workers",
    "tensor_cores": "nothing: it never existed; PyTorch uses TF32 by torch.set_float32_matmul_precision",
    "quant": "the config group quant, e.g. quant=fp8-weights (vLLM's own flag is --quantization)",
    "memory_layout": "nothing: it never existed; leave it out",
    "use_v2_block_manager": "nothing: there is one block manager; leave it out",
    "preemption_mode": "nothing: V1 always recomputes; leave it out",
    "num_lookahead_slots": "speculative_config",
    "disable_log_requests": "enable_log_requests=false, which is the default",
    "guided_decoding_backend": "structured_outputs_config",
    "enable_chunked_prefill_v1": "engine.enable_chunked_prefill",
    "device": "the installed build of vLLM decides",
}
RETIRED_QUANTIZATIONS: dict[str, str] = {
    "mixed-4-8": "a compressed-tensors checkpoint with two groups: quant=mixed-4-8, which evalq makes",
    "mixed_4_8": "a compressed-tensors checkpoint with two groups: quant=mixed-4-8, which evalq makes",
}
