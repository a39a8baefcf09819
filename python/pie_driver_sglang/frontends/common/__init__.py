"""What the frontends share.

`arguments` parses SGLang's `ServerArgs` as the engine supports them (`argument_names` lists them;
`vllm_arguments`: with drivers on vLLM; `driver_options`: for drivers on either;
`eagle_arguments`: for EAGLE heads), `model_location`
finds or downloads a model, `tokenizer` is the tokenizer with incremental detokenization and chat
templates, and `lora_adapters` is the registry of loaded LoRA adapters. `model_updates` changes
weights and releases memory in step with requests, over the connections of `control_socket`.
`profiles` has the drivers profiled over them. `flag_values` reads the values of SGLang's flags
without SGLang's parser, and `scheduler_values` checks those of the scheduler.
"""
