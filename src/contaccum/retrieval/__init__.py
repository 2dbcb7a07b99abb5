"""From a model folder to numbers: encode, search, evaluate."""
