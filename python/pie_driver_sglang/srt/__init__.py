"""The SGLang adapter: the only part of the package that imports SGLang."""
