"""evalq: which quantization may I ship for this model on this GPU, and what does it cost me?"""

__version__ = "0.1.0"
