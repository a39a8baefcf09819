"""`pie-sglang serve --front gateway`: the gateway smg over this package's runtime.

smg is a process of its own, in Rust: HTTP, tokenizer, chat templates, parsers, routing. It calls
the gRPC services that `_core.Gateway` serves inside this process, one port per replica. No token
passes through Python, and only the drivers import SGLang.

====================  ==============================================================================
``supervisor``        the command: starts and supervises drivers, gRPC services and smg
``gateway_flags``     the flags that smg or the engine supports; ``parsers`` maps parser names
``replicas``          the runtimes, each with its gRPC service
``smg``               smg's arguments, start, health check and shutdown
``smg_process``       the program that runs smg and ends with its parent
``metrics_endpoint``  one Prometheus endpoint for smg and the runtimes
====================  ==============================================================================
"""
