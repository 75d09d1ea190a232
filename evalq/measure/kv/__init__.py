"""The KV cache judged where it is read: sensitivity, decode path, long context, retrieval, generation."""
