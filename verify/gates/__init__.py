"""The gate: what a team runs in CI before a change is merged.

`config` reads ci/gate.toml, `touched` asks git, `coverage` finds changed sources without a case,
`pacing` runs cases within a budget, `findings` says what keeps a gate from passing, and `running`
puts it together in a fixed order. The gate adds no way to judge a case: a golden or a reference is
a claim like any other.
"""
