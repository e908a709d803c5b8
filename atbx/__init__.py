"""atbx: a JAX-style functional inference runtime for transformer language models, for Ascend NPUs and CPUs."""
