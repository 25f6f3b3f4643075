"""Reference ops in plain torch: no registration and no SGLang import, so that each one is tested alone.

The names and argument lists are those of the `sgl_kernel` CPU build that SGLang 0.5.23 calls; `shims/sgl_kernel`
registers them. Arithmetic is fp32 inside, whatever the dtype outside.
"""
