"""atbx.ops"""

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.ops: import it by that name")
