"""`pie-sglang serve`: SGLang's own HTTP server over this package's runtime.

SGLang's server, tokenizer manager, detokenizer and parsers run unchanged. In the place of their
scheduler process is one of ours: it hands their messages to `_core.SglangFrontend`, which reads
and writes them in Rust, and answers the few that are not about requests. It never schedules.

=====================  =============================================================================
``serve``              the command: starts the server's process, and cleans up after it
``launch``             that process: whose scheduler it gets; ``flags`` says what ours serves
``scheduler_process``  the process in the place of SGLang's scheduler: sockets, two threads
``parts``              what that process is made of; ``driver_log`` passes the drivers' log on
``flow``               outputs wait for a tokenizer manager that is slower than the model
``control``            messages that are not about requests; ``refusals`` has those not served
``adapters``           LoRA adapters by name
``scheduler_metrics``  the scheduler's metrics for Prometheus
``profile``            steps as a file for a trace viewer
``access``             which key each route needs; ``connections`` limits connections and bodies
``stores``             bounds what is kept for clients; ``answers`` the errors that they get
``media``              images and other media that requests name by URL
``compat``             all that is imported of SGLang
=====================  =============================================================================
"""
