#!/usr/bin/env bash
# Pre-training on a GPU machine, in one call of at most 8 minutes:
#
#     tests/benchmarks/gpu.sh [--data FOLDER] [--device cuda|cpu] [--tiny] [--python PYTHON]
#
# Expects this checkout and a Python 3.11 or newer that has what pyproject.toml asks for (torch, torchvision, timm,
# numpy, safetensors, tyro and so on); the package itself need not be installed. It takes --python, else .venv/bin/python
# where there is one, else python3, and says which module is missing before anything is run.
#
# 1. ViT-S/16 and ViT-B/16 at the published crops and K = 8192, bfloat16, with and without torch.compile, against the
#    published-style step in float32 and under bfloat16 autocast: images/s, MFU, peak memory (3 minutes at most).
# 2. ViT-S/16 for four minutes on FOLDER (default: ../shared/data/imagenette128), by the code of `ibot-eval pretrain`.
#
# Writes gpu.json, gpu.txt and train/ (log.jsonl, record.json) into $OUT (default: runs/gpu).
# `--device cpu --tiny` tries all of it in about a minute without a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."

data=../shared/data/imagenette128 device=cuda tiny=() python=
while [ $# -gt 0 ]; do
    case $1 in
        --data) data=$2; shift 2 ;;
        --device) device=$2; shift 2 ;;
        --tiny) tiny=(--tiny); shift ;;
        --python) python=$2; shift 2 ;;
        *) echo "gpu.sh: unknown option $1 (see the top of the file)" >&2; exit 2 ;;
    esac
done
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
"$python" - <<'CHECK'
import importlib.util, sys
if sys.version_info < (3, 11):
    sys.exit(f"gpu.sh: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
names = "torch torchvision timm numpy safetensors tyro yaml PIL sklearn scipy tqdm".split()
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu.sh: {sys.executable} lacks {', '.join(missing)}: pip install -e . first, or give --python")
CHECK

out=${OUT:-runs/gpu}
mkdir -p "$out"
# The whole has eight minutes; the parts stop by themselves before that.
PYTHONPATH=. exec timeout 475 "$python" tests/benchmarks/gpu_pretrain.py \
    --out "$out" --data "$data" --device "$device" "${tiny[@]}"
