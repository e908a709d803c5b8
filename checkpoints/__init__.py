"""atbx.checkpoints"""

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.checkpoints: import it by that name")
