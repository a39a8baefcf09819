"""Frontends: how requests enter without Pie.

`offline` is the `Engine` class, `sglang_server` SGLang's HTTP server, `gateway` the gateway smg;
`common` has what they share: arguments, tokenizer, LoRA adapters; `batches` runs files of requests.
"""
