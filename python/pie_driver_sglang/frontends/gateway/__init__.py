"""`pie-sglang serve --front gateway`: the gateway smg over this package's runtime.

The gateway is a process of its own, in Rust: HTTP, tokenizer, templates, parsers, routing. It
calls the gRPC services that `_core.Gateway` offers inside this process, one port for each replica
of the model. No token passes Python, and nothing of SGLang is imported here: the drivers do that.

====================  ==============================================================================
``launch``            the command, from start to end
``flags``             what the gateway or the engine honours; ``parsers`` has the names of parsers
``replicas``          the runtimes, each with its gRPC service
``smg``               the gateway's process: its command line, start and end
``smg_process``       the program that this process runs: it ends with its parent
``metrics_endpoint``  one endpoint for the metrics of the gateway and the runtimes
====================  ==============================================================================
"""
