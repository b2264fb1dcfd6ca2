"""Weights of two checkpoints, parameter by parameter: are they the same bits?

`opening` finds out what a path is, one module each reads one kind (`tensor_folders`, `saved`,
`distributed`, `digest_files`), `live` takes digests of a state_dict in a running process,
`matching` pairs names, `fusing` the parts of experts that one side stores fused (`expert_names`,
`expert_parts`), `comparing` decides, `hints` says what a difference looks like, `reporting` prints
it. Comparing two files of digests needs no torch.
"""
