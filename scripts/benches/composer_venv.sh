#!/usr/bin/env bash
# composer_venv.sh [FOLDER]: the real Composer for `bench.py train-pressure`, in a folder of its own without a torch.
# Composer pins an older torch, so nothing it asks for is installed by itself; the bench puts this folder behind its own.
set -euo pipefail
folder=${1:-.venv-composer}
python3 -m venv "$folder"
"$folder/bin/pip" install --no-deps mosaicml==0.32.1 torchvision==0.28.0 'torchmetrics<1.7.5' lightning-utilities numpy \
    tqdm 'torch_optimizer<0.4' pytorch-ranger coolname py-cpuinfo tabulate==0.9.0 'importlib_metadata<9' zipp pillow \
    'mosaicml-cli<0.8' ruamel.yaml prompt_toolkit wcwidth validators gql graphql-core questionary rich backoff \
    argcomplete kubernetes python-dateutil six fire humanize yarl multidict websockets docker arrow anyio tenacity
