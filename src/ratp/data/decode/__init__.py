"""From the bytes of an image file to pixels, one file at a time or many in parallel."""
