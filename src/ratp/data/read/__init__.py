"""Lists the files, layout and classes of a folder or archive."""
