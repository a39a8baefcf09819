"""The SGLang adapter: what of SGLang it reaches is in `seams`, and nothing else imports SGLang."""
