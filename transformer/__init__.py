"""Train, evaluate and run encoder-decoder Transformers for translation (Vaswani et al., 2017).

    job = transformer.compose("train", ["experiment=demo"])       # what the command line would run, typed and checked
    results = transformer.train(job)                              # the scores of the test sets
    transformer.run(transformer.compose("compare", [...]))        # any command, with what it finds
    translator = transformer.load(job.run_dir)
    translator.translate(["She is reading a book."])              # -> a list of as many texts
    transformer.attention_weights(q, k, ...)                      # equation 1 of the paper

Each name is imported when it is used: `import transformer` waits neither for torch nor for Hydra. Every error that a
user can cause or mend is a `TransformerError`; `transformer.errors` has its kinds.
"""

from typing import TYPE_CHECKING

from transformer.errors import TransformerError

__version__ = "0.2.0"

__all__ = [
    "Padded",
    "Results",
    "TransformerError",
    "Translator",
    "__version__",
    "attention_weights",
    "compose",
    "load",
    "run",
    "train",
]

if TYPE_CHECKING:
    from transformer.cli.commands import compose, run
    from transformer.decoding.loading import load
    from transformer.decoding.translator import Translator
    from transformer.layout import Padded
    from transformer.model.attention import attention_weights
    from transformer.records import Results
    from transformer.training.loop import train
else:  # hidden from type checkers, who would let every misspelt name through

    def __getattr__(name: str) -> object:
        """The public name, from the module that defines it (PEP 562)."""
        match name:
            case "compose":
                from transformer.cli.commands import compose as public
            case "run":
                from transformer.cli.commands import run as public
            case "load":
                from transformer.decoding.loading import load as public
            case "Translator":
                from transformer.decoding.translator import Translator as public
            case "Padded":
                from transformer.layout import Padded as public
            case "attention_weights":
                from transformer.model.attention import attention_weights as public
            case "Results":
                from transformer.records import Results as public
            case "train":
                from transformer.training.loop import train as public
            case _:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

        return public


def __dir__() -> list[str]:
    """The public names too, whether or not they have been used."""
    return sorted({*globals(), *__all__})
