"""Cases: a named, seeded recipe that `verify` executes again and again.

A case says how inputs come about (`inputs`, `setup`), what is executed, and what is promised. It
holds no state: every execution gets fresh copies of the same bits. Nobody inherits from it; the
decorator `case` builds one from a plain function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from verify import devices
from verify.errors import CaseError
from verify.goldens import KINDS
from verify.placements import Placement

DEFAULT_CLAIMS = ("repeat", "process", "memory", "threads", "history")
CLAIMS = (
    "repeat",
    "process",
    "memory",
    "threads",
    "history",
    "contention",
    "stream",
    "sms",
    "graph",
    "batch",
    "schedule",
    "vary",
    "ep",
    "rank",
    "reference",
    "exact",
    "golden",
)


ON_CUDA = ("stream", "sms", "graph")
"""Claims about a GPU: for a case without a tensor on one they are UNVERIFIED(unsupported)."""

_IMPLIED = ("batch", "schedule", "vary", "ep", "reference", "exact", "golden")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe and its promises.

    name: how it is called on the command line and in reports.
    execute: takes the inputs by name (and `group`, if it names that parameter: the
        torch.distributed group of this execution, None for one rank) and returns a tensor, or
        mappings and sequences of tensors. Gradients of its differentiable outputs with regard to
        every input and module parameter that requires them are taken with random upstream
        gradients and become outputs called `grad.NAME`.
    inputs: name -> spec (see `verify.normal`, `verify.integers`, ...), the same bits everywhere.
    setup: returns a mapping of further arguments: tensors, torch.nn.Modules (their parameters and
        buffers are restored before every execution), torch.Generators (restored too) or anything
        else, passed on as it is. It runs once per process, with the global generators seeded. It
        is given the device if it has a parameter `device`.
    device: where inputs, and tensors and modules of `setup`, are put: "cpu", "cuda" (rank r has
        GPU r) or "cuda:N", also as a torch.device; "" leaves them where they are made. `--device`
        goes before it.
    shares_gpu: True when several ranks may be on one GPU: their group is then gloo's, not NCCL's.
    claims: what is promised; see CLAIMS. By default DEFAULT_CLAIMS and what is given below:
        `batch`, `schedule`, `vary`, `ep`, `reference`, `exact` and `golden` promise themselves.
        Promising what cannot be checked gives UNVERIFIED.
    placement: tensor name or pattern -> verify.replicated, verify.sharded(dim) or verify.local.
    batch: tensor name or pattern -> the dimension along which its entries are independent.
    schedule: alternative keyword arguments of `execute` that must not change a bit.
    vary: argument name -> alternative values that must not change a bit.
    ep: degrees of parallelism that must give the same bits (those that divide the ranks are run).
    mutates: inputs that `execute` may write to; what it leaves there becomes an output.
    constants: outputs that do not depend on the inputs.
    random: True when drawing from the global generators is intended.
    gradients: False to take none. None are taken either when `execute` calls backward itself;
        what it leaves in `.grad` is compared.
    reference: called with (inputs, upstream, view), returns name -> verify.Reference.
    exact: called with (inputs, upstream, view), returns name -> tensor to equal bit for bit.
    golden: the kind of its stored golden. "exact": bits that are the same in every environment;
        "float64": the reference's values with their budgets; "bits": this environment's bits.
    sources: files that this case covers, besides the one that holds it.
    ranks: how many ranks it is made for, unless the command line says otherwise.
    """

    name: str
    execute: Callable[..., Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    setup: Callable[..., Mapping[str, Any]] | None = None
    claims: Sequence[str] = DEFAULT_CLAIMS
    seed: int = 0
    placement: Mapping[str, Placement] = field(default_factory=dict)
    batch: Mapping[str, int] = field(default_factory=dict)
    schedule: Sequence[Mapping[str, Any]] = ()
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ep: Sequence[int] = ()
    mutates: Sequence[str] = ()
    constants: Sequence[str] = ()
    random: bool = False
    gradients: bool = True
    reference: Callable[..., Mapping[str, Any]] | None = None
    exact: Callable[..., Mapping[str, Any]] | None = None
    golden: str = ""
    sources: Sequence[str] = ()
    ranks: int = 1
    description: str = ""
    device: str = ""
    shares_gpu: bool = False

    def __post_init__(self) -> None:
        if self.claims is DEFAULT_CLAIMS:  # not given
            implied = [name for name in _IMPLIED if getattr(self, name)]
            object.__setattr__(self, "claims", (*DEFAULT_CLAIMS, *implied))
        try:
            object.__setattr__(self, "device", device_name(self.device))
        except CaseError as error:
            raise CaseError(f"case {self.name!r}: {error}") from None
        for name in {*self.vary, *(key for one in self.schedule for key in one)}:
            if not accepts(self.execute, name):
                raise CaseError(
                    f"case {self.name!r}: its function takes no argument {name!r}, which schedule"
                    " or vary changes; add the parameter or correct the name"
                )
        unknown = [claim for claim in self.claims if claim not in CLAIMS]
        if unknown:
            raise CaseError(
                f"case {self.name!r} claims {', '.join(map(repr, unknown))}; "
                f"allowed are {', '.join(CLAIMS)}"
            )
        if isinstance(self.claims, str) or len(set(self.claims)) != len(self.claims):
            raise CaseError(f"case {self.name!r}: claims must be a tuple of distinct names")
        if self.golden and self.golden not in KINDS:
            raise CaseError(
                f"case {self.name!r}: golden={self.golden!r}; allowed are {', '.join(KINDS)}"
            )
        if self.golden == "float64" and self.reference is None:
            raise CaseError(
                f"case {self.name!r}: golden='float64' stores what reference=... gives; add one"
            )
        for claim, given in (
            ("schedule", self.schedule),
            ("vary", self.vary),
            ("ep", self.ep),
            ("batch", self.batch),
            ("golden", self.golden),
        ):
            if claim in self.claims and not given:
                raise CaseError(f"case {self.name!r} promises {claim!r} but gives no {claim}=...")
        for name, value in self.placement.items():
            if not isinstance(value, Placement):
                raise CaseError(
                    f"case {self.name!r}: placement of {name!r} is {value!r}; allowed are "
                    "verify.replicated, verify.sharded(dim) and verify.local"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself, so that a decorated function can still be used."""
        return self.execute(*args, **kwargs)


def device_name(given: Any) -> str:
    """A device as a case writes it: text, or what a torch.device is called.

    Raises CaseError for another type or another device.
    """
    torch = sys.modules.get("torch")  # whoever has a torch.device has imported it
    name = str(given) if torch is not None and isinstance(given, torch.device) else given
    if not isinstance(name, str):
        raise CaseError(
            f"device is {given!r}; allowed are the texts cpu, cuda and cuda:N, such as 'cuda:1', "
            "or a torch.device of them"
        )
    if name:
        devices.parse(name)
    return name


def accepts(function: Callable[..., Any], name: str, *, named: bool = False) -> bool:
    """Whether `function` can be given the keyword argument `name`; `named`: by a parameter so
    called, not by `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.name == name or (p.kind is inspect.Parameter.VAR_KEYWORD and not named)
        for p in parameters
    )


@overload
def case(function: Callable[..., Any]) -> Case: ...
@overload
def case(**options: Any) -> Callable[[Callable[..., Any]], Case]: ...
def case(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turns a function that returns tensors into a case: `@verify.case` or `@verify.case(...)`.

    The options are the fields of `Case`. Arguments without a default need an entry in `inputs` or
    in what `setup` returns.
    """
    if function is None:
        return lambda wrapped: case_of(wrapped, **options)
    if not callable(function):
        raise CaseError(f"@verify.case decorates a function, not {function!r}")
    return case_of(function, **options)


def case_of(function: Callable[..., Any], **options: Any) -> Case:
    """The case of a function; without options it makes the default promises."""
    options.setdefault("name", getattr(function, "__name__", type(function).__name__))
    doc = inspect.getdoc(function) or ""
    options.setdefault("description", doc.splitlines()[0] if doc else "")
    unknown = sorted(set(options) - set(Case.__dataclass_fields__))
    if unknown:
        raise CaseError(
            f"@verify.case does not know {', '.join(unknown)}; "
            f"allowed are {', '.join(sorted(set(Case.__dataclass_fields__) - {'execute'}))}"
        )
    built = Case(execute=function, **options)
    if built.setup is None:
        missing = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in built.inputs
            and name != "group"
        ]
        if missing:
            raise CaseError(
                f"case {built.name!r}: nothing gives the argument {missing[0]!r} of its function; "
                f"add inputs={{{missing[0]!r}: verify.normal(...)}} or a setup"
            )
    return built
