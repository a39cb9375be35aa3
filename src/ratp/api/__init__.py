"""What Python programs and notebooks call: training in one call, and methods made of a loss.

Imports everything but ``executors``, ``studies`` and ``reports``; nothing else imports it.
"""
