"""Tools for testing without the hardware. `software_npu` runs the real torch_npu on a software device."""
