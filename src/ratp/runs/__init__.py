"""One run and its directory: request, plan, stages, journal, states, results.

Imports the layers below it; does not deal with several runs.
"""

DEFAULT_PRESET = "official"
QUICK = "quick"  # the preset of all methods for a machine without a GPU (ratp.training.recipe.quick_values)
SAVE_EVERY = 120.0  # seconds between checkpoints within a stage
