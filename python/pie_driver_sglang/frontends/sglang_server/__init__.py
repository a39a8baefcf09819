"""SGLang's own HTTP server over this package's runtime: `pie-sglang serve`.

SGLang's server, tokenizer manager, detokenizer and parsers run unchanged. Its scheduler process is
replaced by one of ours, which passes requests to `_core.SglangFrontend`, where they are decoded and
encoded in Rust, and answers control messages itself. It never schedules.

=====================  =============================================================================
``server_process``     the HTTP server's process: selects the scheduler and starts the server
``served_flags``       which of SGLang's flags our scheduler supports, and why not the others
``scheduler_process``  the process that replaces SGLang's scheduler: sockets and two threads
``components``         what that process consists of: runtime, requests, adapters, metrics, spans
``held_requests``      requests that arrive while an update waits for others
``flow_control``       backpressure from the tokenizer manager to the scheduler
``control_messages``   messages that are not requests; ``unsupported`` has the rejected ones
``server_adapters``    LoRA adapters, loaded and unloaded while it serves
``scheduler_metrics``  the scheduler's Prometheus metrics
``weight_messages``    messages about weights and memory
``profile``            `/start_profile`: steps, operators and kernels
``access``             authentication: which key each route needs
``connections``        limits on connections, headers and bodies
``batch_endpoints``    `/v1/files` and `/v1/batches`
``batch_service``      runs batches beside the requests of clients
``bounded_store``      a size-bounded dictionary for stored responses
``error_responses``    status, headers and length of error responses
``media``              fetches images and other media that requests name by URL
``compat``             every import of SGLang
=====================  =============================================================================
"""
