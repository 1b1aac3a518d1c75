"""What the OpenAPI document says of OpenAI's responses."""

from __future__ import annotations

import msgspec

from raylm.api.about import CALLED, GENERATING, About
from raylm.api.responses.listing import ItemPage
from raylm.api.responses.request import UNSUPPORTED, ResponsesRequest
from raylm.api.responses.wire import Deleted, Response
from raylm.api.unsupported import HARMLESS

_TAG = "Responses"
_STORED = frozenset({404, 500, 503})

CREATE = About(
    "A response to an input.",
    _TAG,
    (ResponsesRequest,),
    Response,
    msgspec.Raw,
    GENERATING | {404, 424, 429, 507},
    refused=UNSUPPORTED,
    ignored={name: why for name, why in HARMLESS.items() if name not in ResponsesRequest.model_fields},
)
RETRIEVE = About(
    "A stored response.",
    _TAG,
    answer=Response,
    event=msgspec.Raw,
    errors=_STORED | {400},
    query={
        "stream": "true: the events of a response that was created with background and stream.",
        "starting_after": "With stream: the number of the last event that is not wanted.",
    },
)
DELETE = About("Delete a stored response.", _TAG, answer=Deleted, errors=_STORED)
CANCEL = About("Cancel a response that runs in the background.", _TAG, answer=Response, errors=_STORED | CALLED)
INPUT_ITEMS = About(
    "What the model was given for a stored response.",
    _TAG,
    answer=ItemPage,
    errors=_STORED | {400},
    query={
        "limit": "How many, from 1 to 100; 20 without it.",
        "order": "asc or desc, which is the default.",
        "after": "The id of the item behind which the page begins.",
    },
)
