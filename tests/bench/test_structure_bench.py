"""raylm bench structure on the demo model: a few schemas, twice each way."""

from __future__ import annotations

import jsonschema
import pytest

from raylm.bench.schemas import mixed_schemas
from raylm.bench.structure import measure_structure
from raylm.config.engine import EngineConfig


@pytest.mark.usefixtures("demo")
def test_schemas_and_plain_requests_take_turns() -> None:
    config = EngineConfig.model_validate({"model": {"path": "smollm2-135m", "max_model_len": 256}})
    result = measure_structure(config, schemas=3, streams=2, input_len=4, max_tokens=6, repeat=2)
    assert (result.bench, result.schemas, result.streams) == ("structure", 3, 2)
    assert 1 <= result.output_len_mean <= 6
    assert result.tokens_per_s > 0 and result.plain_tokens_per_s > 0 and result.time_ratio > 0


def test_schemas_are_valid_and_the_same_every_time() -> None:
    schemas = mixed_schemas(20)
    assert schemas == mixed_schemas(20) and schemas != mixed_schemas(20, seed=17)
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
