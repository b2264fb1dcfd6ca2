"""`mok` as an experts implementation of Hugging Face transformers, chosen by a config value.

    import mok.integrations.transformers  # registers it
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, experts_implementation="mok"
    )

or `model.set_experts_implementation("mok")` later. Router, shared experts and everything else stay
the model's; its parameters stay as they are stored, mok reads views of them, and gradients arrive
in them. transformers does not save the choice with a model. Runs bf16 weights, or other ones under
torch.autocast to bf16. Refuses by name, when such a layer is called, what mok does not compute
(`fitting`, or `check` before); there is no other implementation behind it. But a model whose
experts transformers lets nobody else run (such as Llama 4) never calls what is registered, and runs
its own code without a word: `check` refuses it. Where transformers splits experts over ranks, each
rank's part is rounded to bf16 before transformers adds them up, so bits then depend on how many
ranks there are. Works with transformers 5.7 and newer, below 6 (`marks` says why); the import
raises UnsupportedError for another version, ImportError for none.

Legend: T tokens, K slots, E experts, H hidden size, I width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mok.config import MoKConfig
from mok.errors import InputError, UnsupportedError
from mok.hopper.support import check_backend
from mok.integrations import marks
from mok.integrations.fitting import swiglu_limit
from mok.layer import moe

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"mok.integrations.transformers needs transformers {marks.OLDEST} or newer, below 6; "
        f"install mok-verify[transformers] ({error})"
    ) from error
try:
    from transformers.integrations.moe import (
        ALL_EXPERTS_FUNCTIONS,
        ExpertsInterface,
        use_experts_implementation,
    )
except ImportError as error:  # before 5.0, experts are modules of their own
    raise marks.unsuited(transformers.__version__, str(error)) from error

_KNOWN = marks.marks_of(use_experts_implementation, transformers.__version__)
NAME = "mok"
Experts = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def register(name: str = NAME, *, backend: str = "auto", config: MoKConfig | None = None) -> None:
    """Makes an `experts_implementation` of this name. "mok" is there after the import.

    backend, config: as of mok.moe. Registering a name again replaces it. Raises InputError for an
    unknown backend and for a name that is somebody else's.
    """
    check_backend(backend)
    theirs = name in ALL_EXPERTS_FUNCTIONS and ALL_EXPERTS_FUNCTIONS[name].__module__ != __name__
    if name == "eager" or theirs:
        raise InputError(
            f"experts implementation {name!r} is there already and not mok's; allowed: another "
            "name. Leave it out for 'mok'."
        )
    ExpertsInterface.register(name, _experts_forward(backend, config))


def check(model: nn.Module) -> int:
    """Raises UnsupportedError if mok cannot run the experts of a model; returns how many layers.

    Runs nothing; 0 is an error, too. Dtypes and devices are checked when the model runs.
    """
    found = [
        module
        for module in model.modules()
        if hasattr(module, "down_proj") and hasattr(type(module), "_apply_gate")
    ]
    for module in found:
        swiglu_limit(module, _KNOWN)
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts module that transformers lets others run; "
            "allowed: a model with mixture-of-experts layers, not quantised."
        )
    return len(found)


def _experts_forward(backend: str, config: MoKConfig | None) -> Experts:
    def mok_experts_forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]; out [T, H]."""
        limit = swiglu_limit(self, _KNOWN)
        gate_up, down = _weights(self, hidden_states)
        gate, up = gate_up.chunk(2, dim=1)
        # Ids of other ranks' experts are E. Before 5.18 nothing marks experts that are split, and
        # the library's own implementations leave E out of any.
        if getattr(self, "_is_expert_parallel", True):
            top_k_index = torch.where(top_k_index == gate_up.shape[0], -1, top_k_index)
        out = moe(
            hidden_states.contiguous(),
            top_k_index.to(torch.int64).contiguous(),
            top_k_weights.to(torch.float32).contiguous(),
            gate,
            up,
            down,
            swiglu_limit=limit,
            config=config,
            backend=backend,
        )
        return out.to(hidden_states.dtype)

    return mok_experts_forward


def _weights(experts: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up_proj and down_proj, of a dtype that mok computes in."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    cast = (
        torch.amp.is_autocast_available(x.device.type)  # not of the meta device
        and torch.is_autocast_enabled(x.device.type)
        and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    )
    allowed = (torch.bfloat16, torch.float16, torch.float32) if cast else (torch.bfloat16,)
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        dtype = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        if dtype not in allowed:
            raise UnsupportedError(
                f"mok cannot run {type(experts).__name__}: {name} is {dtype}; allowed: "
                "torch.bfloat16, or float32 and float16 under torch.autocast to bfloat16. Load the "
                "model with dtype=torch.bfloat16, or choose another experts implementation."
            )
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    return gate_up, down


register()
