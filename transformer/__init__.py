"""Train, evaluate and run encoder-decoder Transformers for translation (Vaswani et al., 2017)."""

__version__ = "0.1.0"
