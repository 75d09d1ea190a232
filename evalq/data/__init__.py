"""Evaluation data written for evalq and shipped with it."""
