"""All imports, patches and subclasses of SGLang's HTTP server.

=======================  ===========================================================================
``server_environment``   environment variables and imports before SGLang is loaded
``http_launch``          SGLang's flags, the launch of its HTTP server and of the schedulers
``forking``              forks the scheduler and the detokenizer instead of spawning them
``http_app``             the HTTP application with our limits, keys and media policy
``batch_app``              batches in that application
``offline_batch``          runs a file of requests where the HTTP server would start
``worker_app``           the same in one of several tokenizer workers
``tokenizer_workers``    settings of several tokenizer workers
``front_forks``          forks tokenizer workers and replicas' schedulers instead of spawning them
``tokenizer_managers``   tokenizer managers that reject what our scheduler does not support
``openai_endpoints``     corrections of the OpenAI endpoints
``ollama_endpoints``     corrections of the Ollama endpoints
``detokenize_endpoint``  correction of `/detokenize`
``messages``             message classes, encoding, and replies
``prompt_lists``         requests with a list of prompts
``prometheus``           SGLang's scheduler metrics, and the times of requests
``adapter_tensors``      LoRA adapters that a client sends as tensors
``weight_tensors``       weights that a client sends as tensors
``scheduler_ipc``        arguments, sockets and signals of a scheduler process
``dp_controller``        the data-parallel controller, blocking instead of polling
``load_snapshots``       the load snapshots that `/v1/loads` reads
``protocols``            what differs between the supported versions of SGLang
``selection``            the modules of the installed version
``v0517``                what only 0.5.17 has
``v0523``                what only 0.5.23 has
=======================  ===========================================================================
"""
