"""Gymnasium environments over schedules and what they cost or measure.

`import looptune.envs` registers them with Gymnasium, which the extra `envs` installs.
"""
