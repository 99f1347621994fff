"""Torch's own search, as a plug-in: see `plugins.SearchBackend`."""

from dataclasses import replace

import torch

from transformer.checkpoint import Checkpoint
from transformer.config.settings import ModelConfig, SearchConfig
from transformer.decoding.proof import prove_replay
from transformer.decoding.translator import Translator
from transformer.run_dir import RunDir


def check_engine(config: ModelConfig, search: SearchConfig, device: torch.device) -> None:
    """Torch searches with any model."""


def with_engine(translator: Translator, run: RunDir, checkpoint: Checkpoint) -> Translator:
    """The translator; a GPU replays its steps where the settings ask for that, and it is sound."""
    is_replayed = translator.search.cuda_graphs and translator.device.type == "cuda"
    return replace(translator, decoder=prove_replay(translator.decoder)) if is_replayed else translator
