"""Stop strings inside an engine: only a beam search, which chooses between sequences, must know there whether one has
ended; all other texts are made by whoever reads the tokens."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from raylm.core.beam import TextEnds
from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError, RequestRejected
from raylm.model_files.source import locate

if TYPE_CHECKING:
    from raylm.text.processor import TextProcessor


class StopStrings:
    """Looks for the stop strings of requests in the tokens of one model. Its tokenizer is read when it is first needed,
    which holds the engine for as long as that takes, and so is what reads tokenizers."""

    def __init__(self, model: str) -> None:
        """`model` is ModelConfig.reference."""
        self._model = model

    def of(self, params: SamplingParams) -> TextEnds:
        """What looks for those of one request. Raises RequestRejected where the tokenizer cannot be read."""
        from raylm.text.ends import text_ends

        try:
            return text_ends(self._text, params)
        except (ConfigError, OSError) as error:
            raise RequestRejected(
                f"stop with beam_width needs the model's tokenizer in the engine: {error}", param="stop"
            ) from None

    @cached_property
    def _text(self) -> TextProcessor:
        from raylm.text.processor import TextProcessor

        return TextProcessor.load(locate(self._model))
