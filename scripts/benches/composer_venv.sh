#!/bin/sh
# Make a venv in FOLDER with Composer and what it imports, beside the packages of the Python that this is started with:
#     scripts/benches/composer_venv.sh FOLDER [PYTHON]
# Without its dependencies: Composer asks for an older torch.
set -eu
folder=$1
python=${2:-python3}
"$python" -m venv "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/base.pth"
"$folder/bin/pip" install -q --no-deps \
    anyio==4.16.0 backoff==2.2.1 coolname==5.0.0 gql==4.4.0 graphql_core==3.3.2 importlib_metadata==10.2.0 \
    lazy_importer==0.1.0 lightning_utilities==0.15.3 mosaicml==0.32.1 mosaicml_cli==0.8.3 mosaicml_streaming==0.13.0 \
    numpy==2.4.6 pillow==13.0.0 prompt_toolkit==3.0.53 py_cpuinfo==9.0.0 python_dateutil==4.0.0 questionary==2.1.1 \
    ruamel_yaml==0.19.1 tabulate==0.10.0 tenacity==9.2.1 torch_optimizer==0.3.0 torchmetrics==1.9.0 \
    torchvision==0.28.0 tqdm==4.70.1 validators==0.36.0 wcwidth==0.9.4 websockets==17.4
"$folder/bin/python" - <<'CHECK'
import torch
stubs = torch.library.Library("torchvision", "DEF")
stubs.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
stubs.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import composer
print("Composer", composer.__version__, "with torch", torch.__version__)
CHECK
