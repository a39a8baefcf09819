"""What frontends share.

`arguments` has SGLang's `ServerArgs` as the engine takes them, `tokenizer` text and tokens,
`adapters` LoRA adapters by name, `types` the types of these.
"""
