"""Images in: from folders, zips and downloads to domains in memory.

`read` finds files, `decode` turns them into pixels, `cache` keeps the result, `catalogue` gets and builds published
data sets, `formats` reads their files, `demo` draws the embedded stream. Imports `_core` only.
"""
