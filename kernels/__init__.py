"""atbx.kernels"""

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.kernels: import it by that name")
