"""The process that the start-up benchmark starts: loads a model, generates one token, says where the time went."""

from __future__ import annotations

import json
import sys
from time import perf_counter


def main(config_json: str) -> None:
    """Print one JSON line when this process runs, and one of phases in seconds once the first token is there."""
    print(json.dumps({"interpreter": True}), flush=True)
    start = perf_counter()
    from raylm.config.engine import EngineConfig
    from raylm.core.sampling import SamplingParams
    from raylm.llm import LLM

    config = EngineConfig.model_validate_json(config_json)
    # LLM imports these itself when it starts an engine; here it is done first, so that it counts as import.
    if config.in_one_process:
        import raylm.executor.local
    else:
        import raylm.executor.ray  # noqa: F401

    phases = {"import": perf_counter() - start}
    start = perf_counter()
    llm = LLM(config, progress=False)
    loading = perf_counter() - start
    for phase, seconds in llm.info.phases.items():
        phases[phase] = phases.get(phase, 0.0) + seconds
    phases["other"] = max(0.0, loading - sum(llm.info.phases.values()))
    start = perf_counter()
    prompt = [llm.info.vocab_size // 2]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), progress=False)
    phases["first_token"] = perf_counter() - start
    llm.close()
    print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
