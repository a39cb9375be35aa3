"""Mathematics that several methods share, tensors in and tensors out: losses, labels, RandMix, optimisers, transforms.

What only one method needs is in the file of that method. `kernels` has fused GPU versions. Knows no network, method or
file; imports `_core`, `config` and `errors` only.
"""
