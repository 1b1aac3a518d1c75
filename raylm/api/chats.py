"""What all APIs that chat have in common."""

from __future__ import annotations

from dataclasses import replace

from raylm.api.params import Asking
from raylm.api.structure import Asked
from raylm.generation.chat import Chat, OpenedChat, open_chat
from raylm.generation.served_model import ServedModel


def opened_chat(model: ServedModel, chat: Chat, asked: Asking) -> tuple[OpenedChat, Asking]:
    """The chat, and what its request asks for, in the formats of the model. Raises RequestRejected."""
    given = asked.structure
    chat = chat._replace(structure=None if given is None else given.structure)
    opened = open_chat(model.text, model.ability.format, chat, asked.wanted.params)
    own = "functions" if chat.tools.legacy else "tools"
    param = own if given is None else given.param
    structure = None if opened.structure is None else Asked(opened.structure, param)
    if structure is not None:
        # What cannot go with a structure is refused before that costs a compilation.
        replace(opened.params, structure=structure.structure)
    return opened, asked._replace(wanted=asked.wanted._replace(params=opened.params), structure=structure)
