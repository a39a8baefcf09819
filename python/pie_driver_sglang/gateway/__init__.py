"""`pie-sglang serve --front gateway`: the gateway smg over this package's runtime.

The gateway is a process of its own, in Rust: HTTP, tokenizer, templates, parsers, routing. It
calls the gRPC services that `_core.Gateway` offers inside this process, one port for each replica
of the model. No token passes Python, and nothing of SGLang is imported here: the drivers do that.
"""
