"""Plugins of SGLang's own server: the drafter and the prefix index. The driver imports neither."""
