"""`verify onpolicy --model`: one model sampled and scored on this machine, and where both part."""
