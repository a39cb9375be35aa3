"""How labelled images lie on disk: the one form the program reads, and the many it can be made from."""
