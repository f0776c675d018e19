"""Lets the unmodified SGLang wheel serve, EAGLE-3 included, on a machine without a GPU.

With this folder on PYTHONPATH every Python process, those that SGLang spawns too, starts through
`sitecustomize`: it sets three environment variables and asks to patch a handful of SGLang's modules
just after each is imported. Nothing is imported early, so processes load what they would load
anyway.
"""
