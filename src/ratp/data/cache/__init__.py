"""Decoded images on disk: decoded once, checked by a manifest, memory-mapped from then on."""
