"""Mathematics: tensors in, tensors out. Losses, pseudo-labels, RandMix, optimisers, image transforms.

`kernels` holds fused GPU versions. Knows no network, method or file; imports `_core`, `config` and `errors` only.
"""
