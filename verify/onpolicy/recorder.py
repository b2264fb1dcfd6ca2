"""Ten lines that write what `verify onpolicy` needs, from inside a sampler or a trainer.

    from verify.onpolicy.recorder import Recorder

    recorder = Recorder("rollout.jsonl", "sampler", temperature=1.0, top_p=1.0)
    ...
    recorder.add(request_id, output.token_ids, logprobs, prompt_ids=prompt.token_ids)

and the same beside the trainer, with Recorder("trainer.jsonl", "trainer") and the same ids. Values
are written with all their bits, and with the dtype that they had. Each call appends one line by one
write, so that several processes can share a file; nothing is kept in memory. SNIPPET does the same
in an engine that cannot import this package.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verify.errors import InputFileError
from verify.onpolicy.samples import META

SIDES = ("sampler", "trainer")

SNIPPET = '''\
def record_onpolicy(path, side, id, response_ids, logprobs, prompt_ids=None, mask=None, **meta):
    """side: "sampler" or "trainer". Values are lists or tensors, one a token of the response."""
    import json
    plain = lambda value: value.tolist() if hasattr(value, "tolist") else value
    line = {"id": str(id), "response_ids": plain(response_ids), f"{side}_logprobs": plain(logprobs),
            "prompt_ids": plain(prompt_ids), "mask": plain(mask), "meta": meta}
    if hasattr(logprobs, "dtype"):
        line[f"{side}_dtype"] = str(logprobs.dtype).removeprefix("torch.")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\\n")
'''
"""Ten lines of plain Python to paste into an engine; they need nothing but json."""


class Recorder:
    """Appends one line for each response.

    side: "sampler" or "trainer". config: settings of the whole file, by the names of samples.META.
    Raises InputFileError where the file cannot be written, ValueError for a wrong side or name.
    """

    def __init__(self, path: str | Path, side: str, **config: Any) -> None:
        if side not in SIDES:
            raise ValueError(f"side is {side!r}; allowed are {' and '.join(SIDES)}")
        _check_names(config)
        self.path = Path(path)
        self.side = side
        if config:
            self._append({"onpolicy": 1, "config": config})

    def add(
        self,
        id: str | int,
        response_ids: Any,
        logprobs: Any,
        *,
        prompt_ids: Any = None,
        mask: Any = None,
        experts: Any = None,
        experts_start: int = 0,
        margins: Any = None,
        layers: Sequence[int] | None = None,
        text: str | None = None,
        **meta: Any,
    ) -> None:
        """One response: lists, NumPy arrays or tensors of any device.

        response_ids, mask: [n]; logprobs: [n], natural logarithm, of the tokens that were sampled.
        experts: integers [rows, layers, k]; experts_start: the position in prompt and response of
        row 0; margins: [rows, layers]. meta: settings of this response, by the names of
        samples.META.

        Raises ValueError for lists of other lengths than the response's, and for unknown names.
        """
        _check_names(meta)
        _check_lengths(response_ids, logprobs, mask)
        line: dict[str, Any] = {"id": id if isinstance(id, int) else str(id)}
        line["prompt_ids"] = _plain(prompt_ids)
        line["response_ids"] = _plain(response_ids)
        line[f"{self.side}_logprobs"] = _plain(logprobs)
        line[f"{self.side}_dtype"] = _dtype(logprobs)
        line["mask"] = _plain(mask)
        if experts is not None:
            routes = {"experts": _packed(experts), "start": experts_start}
            routes |= {"margins": _plain(margins), "layers": _plain(layers)}
            line["routing"] = {self.side: routes}
        line |= {"text": text, "meta": meta or None}
        self._append({name: value for name, value in line.items() if value is not None})

    def _append(self, line: Mapping[str, Any]) -> None:
        content = (json.dumps(line) + "\n").encode("ascii")
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                while content:  # one write, unless the disk takes only a part
                    content = content[os.write(file, content) :]
            finally:
                os.close(file)
        except OSError as error:
            raise InputFileError(
                f"{self.path}: cannot be written: {error.strerror}; give a path in a folder that "
                "exists and has room"
            ) from error


def _check_names(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in META:
            raise ValueError(f"no setting is called {name!r}; known are {', '.join(META)}")


def _check_lengths(response_ids: Any, logprobs: Any, mask: Any) -> None:
    """One value a token; what has no length, or more than one dimension, is no list of them."""
    for name, value in (("logprobs", logprobs), ("mask", mask)):
        if value is None or response_ids is None:
            continue
        try:
            sizes = len(response_ids), len(value)
        except TypeError as error:
            raise ValueError(f"response_ids and {name} are lists, arrays or tensors [n]") from error
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"response_ids has {sizes[0]} tokens and {name} {sizes[1]} entries; give one for "
                "each token of the response, null for what was not computed"
            )


def _plain(value: Any) -> Any:
    """Lists of Python numbers; a tensor's own tolist keeps every bit, bfloat16 included."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, Sequence | range) else value


def _dtype(value: Any) -> str | None:
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else None


def _packed(value: Any) -> dict[str, Any]:
    found = np.asarray(_plain(value))
    if found.ndim != 3 or (found.dtype.kind not in "iu" and found.size):
        raise ValueError(
            f"experts are {found.dtype} {list(found.shape)}; they are integers [rows, layers, k]"
        )
    low, high = (int(found.min()), int(found.max())) if found.size else (0, 0)
    if low < -1 or high >= 2**31:
        raise ValueError(f"experts are {low} to {high}; they are numbers from 0, or -1 for none")
    kind = np.int16 if high < 2**15 else np.int32
    data = base64.b64encode(found.astype(np.dtype(kind).newbyteorder("<")).tobytes())
    return {
        "data": data.decode("ascii"),
        "dtype": np.dtype(kind).name,
        "shape": list(found.shape),
    }
