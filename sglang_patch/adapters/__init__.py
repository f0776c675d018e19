"""The only code that touches SGLang and torch objects. One function per row of
`sglang_patch.hooks`.
"""
