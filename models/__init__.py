"""atbx.models"""

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.models: import it by that name")
