"""RaTP once more, slow and plain, written for reading: the peer of ``ratp`` in tests and benchmarks.

Every part is what the paper and its published code say, written the first way one would write it: images from files,
one after another, eager PyTorch, scikit-learn, NumPy. :class:`ratp_reference.method.PlainRaTP` puts them together. It
draws its random numbers from the generators of the fast path, in the same order, so that the same start gives the same
numbers: on processors, after some steps, parameters within 1e-5 of each other in single precision and within 1e-9 in
double.

It shares with ``ratp`` its switches (the dataclasses), its named generators and the drawing of random numbers
(``draw`` of RandMix and of the transforms), and nothing that computes.
"""
