"""Names that SGLang imports and, on the paths under test, never calls."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} has no CPU stand-in")

    return refuse
