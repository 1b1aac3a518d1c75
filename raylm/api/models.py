"""GET /v1/models: which models there are."""

from __future__ import annotations

import msgspec

from raylm.api.about import About
from raylm.api.call import Call
from raylm.api.preparation import Models
from raylm.api.protocol import ModelCard, ModelList, ModelPermission
from raylm.generation.served_model import ServedModel

ABOUT_LIST = About("The models.", "Models", answer=ModelList)
ABOUT_ONE = About("One model.", "Models", answer=ModelCard, errors=frozenset({404, 503}))


class ModelListing:
    """The models as OpenAI's clients read them."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, call: Call) -> bytes:
        return msgspec.json.encode(
            ModelList([_card(model, name) for model in self._models.all() for name in (model.name, *model.aliases)])
        )

    async def describe(self, call: Call) -> bytes:
        """One model; /v1/models/, as some clients write /v1/models, names none and gives the list."""
        name = call.path.get("model", "")
        return msgspec.json.encode(_card(self._models.get(name), name)) if name else await self.list(call)


def _card(model: ServedModel, name: str) -> ModelCard:
    """The model under one of its names."""
    permission = ModelPermission(f"modelperm-{name}", model.created)
    return ModelCard(name, model.created, model.max_model_len, root=model.name, permission=[permission])
