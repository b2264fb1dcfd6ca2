"""Files of digests of weights: small, whole, and refused with a reason when malformed."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import digests, refused_at_once, weights


def test_a_file_is_small_and_replaced_as_a_whole(tmp_path) -> None:
    state = {f"model.layers.{n}.self_attn.q_proj.weight": torch.ones(2, 2) for n in range(291)}
    path = digests(tmp_path / "deep" / "a.json", state)
    assert path.stat().st_size < 60_000
    digests(path, {"w": torch.ones(1)})
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    assert list(json.loads(path.read_text())["parameters"]) == ["w"]
    with pytest.raises(ValueError, match="rank 3 of 2"):
        digests(path, state, rank=3, world=2)
    with pytest.raises(ValueError, match="rank 3 of None"):
        digests(path, state, rank=3)


ZERO = "0" * 64
PART = {"box": [[0, 1]], "digest": f"float32[2]{{1}}:{ZERO}"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "other"}, "it does not say 'mok-verify digests of weights'"),
        ({"version": 2}, "it is of version 2 and scheme 'lanes4x64-v1', this is version 1"),
        ({"scheme": "crc"}, "save it again with this version"),
        ({"rank": 0}, "rank 0 of None: both are null, or 0 <= rank < world"),
        ({"rank": True, "world": 2}, "rank True of 2"),
        ({"parameters": []}, "it has no parameters"),
        ({"parameters": {"w": "float32[2]:00"}}, "parameter 'w': not a digest"),
        ({"parameters": {"w": f"float32[2]{{1}}:{ZERO}"}}, "covers a part, and does not say which"),
        ({"parameters": {"w": []}}, "is neither a digest nor a list of parts"),
        ({"parameters": {"w": 3}}, "is neither a digest nor a list of parts"),
        ({"parameters": {"w": [{"box": [[0, 1]]}]}}, "lacks 'digest'"),
        ({"parameters": {"w": [{**PART, "box": [[0, 3]]}]}}, "part [0:3] does not lie in [2]"),
        ({"parameters": {"w": [{**PART, "box": [[0, 2]]}]}}, "counts 1 elements, its box has 2"),
        ({"parameters": {"w": [{**PART, "box": [[0, 1.0]]}]}}, "edges are integers"),
        ({"parameters": {"w": [{**PART, "box": [["0", 1]]}]}}, "edges are integers"),
        ({"parameters": {"w": [{**PART, "box": 3}]}}, "parameter 'w': "),
    ],
)
def test_a_malformed_file_of_digests(change, told, tmp_path) -> None:
    path = digests(tmp_path / "a.json", {"w": torch.ones(2)})
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **change}))
    code, out, err = weights(path, path)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith(f"verify: {path}: ")


def test_files_of_ranks_that_do_not_belong_together(tmp_path) -> None:
    half = {"w": (0, 0, (4,))}
    state = {"w": torch.ones(2)}
    digests(tmp_path / "a.json", state, rank=0, world=2, places=half)
    digests(tmp_path / "b.json", state, rank=0, world=2, places=half)
    assert "b.json: is of rank 0, as " in refused_at_once(tmp_path)
    digests(tmp_path / "b.json", state, rank=1, world=3, places={"w": (0, 2, (4,))})
    assert "b.json: is of 3 ranks, but " in refused_at_once(tmp_path)
    digests(tmp_path / "b.json", state, rank=1, world=2, places={"w": (0, 1, (4,))})
    assert "'w' has parts that overlap: were they saved at one time?" in refused_at_once(tmp_path)
    digests(tmp_path / "b.json", state, rank=1, world=2, places={"w": (0, 2, (5,))})
    assert "'w' is float32[5]{2}, but float32[4]{2} in " in refused_at_once(tmp_path)
    digests(tmp_path / "b.json", state)
    assert "and not each says its rank" in refused_at_once(tmp_path)
