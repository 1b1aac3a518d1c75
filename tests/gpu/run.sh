#!/usr/bin/env bash
# On a CUDA host, with the extension built (make ext): every test that needs a GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m pytest -m gpu "$@"
