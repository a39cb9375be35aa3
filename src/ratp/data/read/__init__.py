"""What lies in a folder or archive: its files, its layout, its classes."""
