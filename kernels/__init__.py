"""atbx.kernels: one folder a backend, with the kernels that serve the ops there and the fusion rules that pay there."""

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.kernels: import it by that name")
