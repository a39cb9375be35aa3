"""A trained model in use: it predicts, notices new kinds of images, adapts to them and can go back.

May import everything but ``cli``. ``docs/how-to/deploy.md`` is the manual.
"""
