"""`pie-sglang serve`: SGLang's own HTTP server over this package's runtime.

SGLang's server, tokenizer manager, detokenizer and parsers run unchanged. In the place of their
scheduler process is one of ours: it hands their messages to `_core.Front`, which reads and writes
them in Rust, and answers the few that are not about requests. It never schedules.
"""
