"""Gymnasium environments over schedules and what they cost or measure.

Importing this registers `looptune/LoopTune-v0`, the paper's, `looptune/LoopNest-v0`, our
primitives, and `looptune/Construct-v0`, which the shipped policy is trained on.
"""

try:
    from gymnasium.envs.registration import register
except ImportError as missing:
    raise ImportError(
        "looptune.envs needs gymnasium: pip install -c constraints.txt '.[envs]' in the checkout "
        "brings it"
    ) from missing

ENVIRONMENTS = {
    "looptune/Construct-v0": "looptune.envs.construct:ConstructEnv",
    "looptune/LoopNest-v0": "looptune.envs.loopnest:LoopNestEnv",
    "looptune/LoopTune-v0": "looptune.envs.looptune_v0:LoopTuneEnv",
}

for name, place in ENVIRONMENTS.items():
    register(name, entry_point=place, nondeterministic=True, disable_env_checker=True)
