"""The core: trees, abstract values, programs, the staging tracer, buckets, variants, bindings, explanations.

It knows no op by name and no backend.
"""
