"""Other people's mixture-of-experts layers, to be timed beside ours and checked by `verify`.

Each module adapts one of them and imports it only when it is used; what is not installed is named
with the reason and left out. All adapters are ours, the peers are imported from their packages.

torch           `torch._grouped_mm` and eager operators          (module torch_pipeline)
huggingface     transformers' grouped_mm experts                 (module huggingface)
liger           Liger-Kernel's fused MoE in Triton               (module liger)
sonicmoe        SonicMoE on QuACK's CuTe-DSL GEMMs               (module sonic)
deepgemm        grouped GEMMs only                               (module deepgemm)

With several ranks torch and sonicmoe run between NCCL all-to-alls (module nccl); the others are one
rank's.

How to install them (Python 3.12, x86-64 Linux, torch 2.11 with CUDA 13.0 and its Triton 3.6):

    pip install transformers==5.17.0 liger-kernel==0.8.5
    pip install --no-deps sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11
    pip install --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.3.11 torch-c-dlpack-ext==0.1.5
    pip install --no-deps nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2

--no-deps because SonicMoE pins an older torch than it needs. DeepGEMM compiles with nvcc: set
CUDA_HOME to its root. SonicMoE compiles 80 kernels at first use (about two minutes) and keeps them
in QUACK_CACHE_DIR; QUACK_COMPILE_WORKERS=1 keeps that in one process. Triton kernels of Liger and
SonicMoE are compiled by `python -m mok.bench.peers.warming`, on all cores at once.
MOK_PEERS_TUNING=full tunes over the peers' own candidate lists (see `tuning`).
"""

from __future__ import annotations

from mok.bench.contenders import Contender, Inputs, Missing
from mok.bench.peers import deepgemm, huggingface, liger, sonic, torch_pipeline
from mok.bench.peers.adapting import Peer, contender_of
from mok.bench.peers.gemms import GroupedGemm

PEERS: tuple[Peer, ...] = (torch_pipeline.PEER, huggingface.PEER, liger.PEER, sonic.PEER)


def available() -> list[Contender | Missing]:
    """Every peer in the order of PEERS: a contender, or missing with the reason."""
    return [contender_of(peer) for peer in PEERS]


def grouped_gemms(inputs: Inputs) -> list[GroupedGemm | Missing]:
    """GEMM-only rows on a GPU with the routing and weights of `inputs`, one rank."""
    found: list[GroupedGemm | Missing] = [*torch_pipeline.grouped_gemms(inputs)]
    missing = deepgemm.missing()
    return [*found, *([missing] if missing else deepgemm.grouped_gemms(inputs))]
