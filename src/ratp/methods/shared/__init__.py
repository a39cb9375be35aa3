"""Parts that families of methods share: source-free and online adaptation, pseudo-labels, RandMix copies."""
