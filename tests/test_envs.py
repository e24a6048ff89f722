"""The environments: their contract, what is legal, and that nothing is shared by accident."""

import math
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from harness import needs_host

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv  # noqa: E402

from looptune.default import default_schedule  # noqa: E402
from looptune.envs import ENVIRONMENTS, loopnest, looptune_v0  # noqa: E402
from looptune.envs.episode import ILLEGAL_PENALTY, PATIENCE  # noqa: E402
from looptune.envs.loopnest import TABLE, Walk, walk_from  # noqa: E402
from looptune.envs.problem import Problem, drawn  # noqa: E402
from looptune.envs.rewards import clipped, modelled  # noqa: E402
from looptune.errors import (  # noqa: E402
    ArgumentError,
    ArgumentTypeError,
    LoweringError,
    ScheduleError,
)
from looptune.graph import LOOPS, shapes  # noqa: E402
from looptune.schedule import Schedule, replay  # noqa: E402
from looptune.search import SPLITS  # noqa: E402
from looptune.target import Target, target_named  # noqa: E402
from looptune.workloads import conv2d, einsum, matmul  # noqa: E402

IDS = sorted(ENVIRONMENTS)
GRAPHS = [name for name in IDS if "LoopTune" not in name]
AVX2 = target_named("avx2")
MATMUL = Problem(matmul(96, 80, 64).nests[0], AVX2)
SHARED = Problem(matmul(256, 256, 256).nests[0], AVX2, threads=4)
CONV = Problem(conv2d((1, 8, 14, 14), (16, 8, 3, 3), padding=1).nests[0], AVX2)
PROBLEMS = (MATMUL, SHARED, CONV)


def any_of_three(rng: np.random.Generator) -> Problem:
    return PROBLEMS[int(rng.integers(3))]


def options(problem: Problem = MATMUL, **more: object) -> dict[str, object]:
    return {
        "nest": problem.nest, "target": problem.target, "threads": problem.threads, **more,
    }  # fmt: skip


def made(name: str, **arguments: object) -> Any:
    arguments.setdefault("problems", any_of_three)
    return gymnasium.make(name, **arguments).unwrapped


def legal(info: dict[str, Any], rng: np.random.Generator) -> int:
    found = np.flatnonzero(info["action_mask"])
    return int(rng.choice(found)) if len(found) else 0


def episode(env: Any, seed: int, **more: object) -> list[tuple[Any, float, bool, bool, Any]]:
    """A random episode; the steps, the reset among them as one of no reward."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed, options=more or None)
    found = [(observation, 0.0, False, False, info)]
    while not (found[-1][2] or found[-1][3]):
        found.append(env.step(legal(found[-1][4], rng)))
    return found


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(np.array_equal(first, second))


@pytest.mark.parametrize("name", IDS)
def test_the_checker_of_gymnasium_is_content(name: str) -> None:
    env = gymnasium.make(name, problems=any_of_three, render_mode="ansi").unwrapped
    check_env(env)


@pytest.mark.parametrize("name", IDS)
def test_ids_need_only_the_name_of_the_package(name: str) -> None:
    env = gymnasium.make(f"looptune.envs:{name}", problems=any_of_three)
    assert env.spec.max_episode_steps is None
    assert env.spec.nondeterministic


@pytest.mark.parametrize("name", IDS)
def test_a_seed_decides_everything(name: str) -> None:
    first, second = (episode(made(name), seed=7) for _ in range(2))
    assert len(first) > 2
    assert equal(first, second)


@pytest.mark.parametrize("name", IDS)
def test_observations_are_in_their_space_and_belong_to_the_caller(name: str) -> None:
    env = made(name)
    for observation, *_ in episode(env, seed=3):
        assert env.observation_space.contains(observation)
        for array in observation.values() if isinstance(observation, dict) else [observation]:
            array[...] = 1
    again = episode(env, seed=3)
    assert equal(again, episode(made(name), seed=3))


@pytest.mark.parametrize("name", IDS)
def test_episodes_survive_pickling(name: str) -> None:
    env = made(name)
    _, info = env.reset(seed=1)
    action = legal(info, np.random.default_rng(0))
    twin = pickle.loads(pickle.dumps(env))
    assert equal(env.step(action), twin.step(action))


@pytest.mark.parametrize("name", IDS)
def test_a_fork_goes_on_independently(name: str) -> None:
    rng = np.random.default_rng(5)
    env = made(name)
    _, info = env.reset(seed=5)
    *_, info = env.step(legal(info, rng))
    twin = env.fork()
    before, drawn_before = env.state, env.np_random.bit_generator.state
    ended = False
    while not ended:
        ended = any(twin.step(legal({"action_mask": twin.state.mask}, rng))[2:4])
    twin.reset()
    assert env.state is before
    assert env.np_random.bit_generator.state == drawn_before
    twin, action = env.fork(), legal(info, rng)
    assert equal(env.step(action), twin.step(action))


@pytest.mark.parametrize("name", IDS)
def test_undo_goes_back_to_the_start(name: str) -> None:
    env = made(name)
    steps = episode(env, seed=11)
    for observation, *_ in reversed(steps[:-1]):
        assert equal(env.undo(), observation)
    assert equal(env.undo(), steps[0][0])
    assert equal(env.step(legal(steps[0][4], np.random.default_rng(11))), steps[1])


@pytest.mark.parametrize("name", IDS)
def test_masks_are_the_same_under_every_name(name: str) -> None:
    env = made(name)
    for observation, *_, info in episode(env, seed=2):
        if isinstance(observation, dict):
            assert np.array_equal(observation["action_mask"], info["action_mask"])
    assert env.action_masks().dtype == bool
    assert np.array_equal(env.action_masks(), info["action_mask"])


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_environments_run_in_vectors(name: str, vector: Any) -> None:
    envs = vector([partial(made, name)] * 2)
    try:
        observations, infos = envs.reset(seed=0)
        rng = np.random.default_rng(0)
        for _ in range(14):
            masks = infos["action_mask"]
            actions = [legal({"action_mask": mask}, rng) for mask in masks]
            observations, rewards, *_, infos = envs.step(np.array(actions))
            assert rewards.shape == (2,)
        assert envs.observation_space.contains(observations)
    finally:
        envs.close()


@pytest.mark.parametrize("name", IDS)
def test_rendering_tells_the_loops(name: str) -> None:
    env = made(name, render_mode="ansi")
    env.reset(options=options())
    assert "m" in env.render()
    assert made(name).render() is None


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    "wrong", [{"reward": "luck"}, {"render_mode": "human"}], ids=["reward", "render mode"]
)
def test_unknown_settings_are_told(name: str, wrong: dict[str, str]) -> None:
    (value,) = wrong.values()
    with pytest.raises(ArgumentError, match=value):
        made(name).__class__(**wrong)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nest": 3}, "nest=3; a Nest would do"),
        ({"nest": matmul(8, 8, 8)}, "^nest is a Plan; its plan\\.nests"),
        ({"target": MATMUL.nest}, "^target=.{,40}; a Target would do"),
        ({"target": "avx2"}, "target='avx2'; a Target would do"),
        ({"nest": MATMUL.nest, "target": None}, "target=None; a Target would do"),
        ({"threads": 0}, "threads=0; a whole number from 1 would do"),
        ({"threads": 1.5}, "threads=1.5; a whole number"),
        ({"threads": "x"}, "threads='x'; a whole number"),
        (5, "options=5; a mapping"),
        (0, "options=0; a mapping"),
        ({3: 4, "nets": 5}, r"options \[3, 'nets'\]"),
    ],
)
def test_options_of_another_kind(name: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(name).reset(options=given)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problems": None}, "problems=None; a function of a generator"),
        ({"problems": [MATMUL]}, "as listed"),
        ({"reward": None}, r"reward=None; one of \['measured', 'model'\]"),
        ({"reward": 3}, "reward=3; one of"),
    ],
)
def test_arguments_of_another_kind(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(name, **arguments)


def test_a_construction_starts_with_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"options \['start'\]"):
        made("looptune/Construct-v0").reset(options={"start": "untuned"})


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("action", [1.7, "1", None, [1], np.array([1]), np.nan])
def test_actions_that_are_no_whole_numbers(name: str, action: object) -> None:
    env = made(name)
    env.reset(seed=0)
    with pytest.raises(ArgumentTypeError, match="; a whole number would do"):
        env.step(action)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("kind", [int, np.int8, np.uint16, np.int64, np.array])
def test_actions_are_any_whole_numbers(name: str, kind: Any) -> None:
    env = made(name)
    _, info = env.reset(seed=0, options=options())
    action = int(np.flatnonzero(info["action_mask"])[0])
    assert not env.step(kind(action))[-1]["illegal"]


@pytest.mark.parametrize("name", IDS)
def test_unknown_options_are_told(name: str) -> None:
    with pytest.raises(ArgumentError, match="nets"):
        made(name).reset(options={"nets": 1})


@pytest.mark.parametrize("name", GRAPHS)
def test_a_nest_without_room_is_told(name: str) -> None:
    letters = "abcdefghijk"
    (nest,) = einsum(f"{letters},k->{letters[:-1]}", sizes=dict.fromkeys(letters, 2)).nests
    with pytest.raises(ArgumentError, match="11 axes and 3 operands; up to 10 and 6"):
        made(name).reset(options=options(Problem(nest, AVX2)))


def test_an_unknown_start_is_told() -> None:
    with pytest.raises(ArgumentError, match="middle"):
        made("looptune/LoopNest-v0").reset(options=options(start="middle"))


@pytest.mark.parametrize("name", GRAPHS)
def test_an_illegal_action_changes_nothing_and_costs_a_little(name: str) -> None:
    env = made(name)
    observation, info = env.reset(options=options())
    forbidden = int(np.flatnonzero(info["action_mask"] == 0)[0])
    for turn in range(1, PATIENCE + 1):
        same, reward, terminated, truncated, info = env.step(forbidden)
        assert equal(same, observation)
        assert (reward, terminated, info["illegal"]) == (ILLEGAL_PENALTY, False, True)
        assert truncated == (turn == PATIENCE)


@pytest.mark.parametrize("name", IDS)
def test_actions_outside_of_the_space_are_refused(name: str) -> None:
    env = made(name)
    env.reset(options=options())
    for action in (-1, env.action_space.n, 999_999):
        with pytest.raises(ArgumentError, match=rf"action {action}; 0 to \d+ would do"):
            env.step(action)


@pytest.mark.parametrize("name", IDS)
def test_steps_behind_the_end_do_nothing_and_warn(name: str) -> None:
    env = made(name)
    _, info = env.reset(options=options())
    ended = False
    while not ended:
        action = int(np.flatnonzero(info["action_mask"])[-1])
        last, _, terminated, truncated, info = env.step(action)
        ended = terminated or truncated
    with pytest.warns(UserWarning, match="the episode is over"):
        again, reward, *ends, _ = env.step(action)
    assert equal(again, last)
    assert (reward <= 0, ends) == (True, [terminated, truncated])


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["matmul", "shared", "conv"])
def test_rewards_from_the_default_add_up_to_the_gain(name: str, problem: Problem) -> None:
    env = made(name)
    for seed in range(5):
        steps = episode(env, seed, **options(problem))
        info = steps[-1][4]
        total = sum(reward for _, reward, *_ in steps)
        start = 0.0 if name.endswith("LoopNest-v0") else env.past[0].worth
        assert total == pytest.approx(clipped(info["gain"]) - start, abs=2e-3)
        assert info["schedule"] == env.state.schedule.order
        exact = modelled(problem, env.state.schedule)
        assert clipped(info["gain"]) == pytest.approx(clipped(exact), abs=2e-3)


def test_discounted_rewards_add_up_to_the_discounted_gain() -> None:
    env = made("looptune/LoopNest-v0", gamma=0.9)
    steps = episode(env, 4, **options())[1:]
    total = sum(reward * 0.9**turn for turn, (_, reward, *_) in enumerate(steps))
    last = clipped(steps[-1][4]["gain"])
    assert total == pytest.approx(0.9 ** (len(steps) - 1) * last, abs=1e-3)


def test_without_shaping_only_the_end_is_rewarded() -> None:
    steps = episode(made("looptune/LoopNest-v0", shaping=False), 4, **options())
    assert [reward for _, reward, *_ in steps[:-1]] == [0.0] * (len(steps) - 1)
    assert steps[-1][1] == clipped(steps[-1][4]["gain"])


@pytest.mark.parametrize("shaping", [True, False])
@pytest.mark.parametrize("gain", [-0.4, None, 0.3])
def test_no_loss_is_counted_where_the_default_may_be_kept(
    gain: float | None, shaping: bool
) -> None:
    env = made("looptune/Construct-v0", reward=lambda *_: gain, shaping=shaping, least=0.0)
    for seed in range(3):
        steps = episode(env, seed, **options())
        assert sum(reward for _, reward, *_ in steps) == pytest.approx(
            max(0.0, gain or 0.0), abs=1e-6
        )
        assert steps[-1][4]["gain"] == gain


@pytest.mark.parametrize("least", [0.1, -2.5, float("nan")])
def test_the_least_reward_is_none_above_the_defaults(least: float) -> None:
    with pytest.raises(ArgumentError, match="least="):
        made("looptune/Construct-v0", least=least)


def test_a_function_is_a_reward() -> None:
    env = made("looptune/LoopNest-v0", reward=lambda problem, schedule: 0.25, shaping=False)
    env.reset(options=options())
    _, reward, terminated, _, info = env.step(loopnest.STOP)
    assert (reward, terminated, info["gain"]) == (0.25, True, 0.25)


def test_what_cannot_be_run_gets_the_least_reward() -> None:
    env = made("looptune/LoopNest-v0", reward=lambda problem, schedule: None, shaping=False)
    env.reset(options=options())
    assert env.step(loopnest.STOP)[1] == -2.0


def test_without_gymnasium_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['gymnasium'] = None; import looptune.envs"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: looptune.envs needs gymnasium" in done.stderr
    assert "pip install -c constraints.txt '.[envs]'" in done.stderr


# LoopNest-v0


def by_trying(walk: Walk, action: int, seen: set[str]) -> bool:
    """Whether an action leads somewhere: it applies, fits the slots, and changes the schedule."""
    nest, threads = walk.problem.nest, walk.problem.threads
    if TABLE.axis_at <= action < TABLE.loop_at:
        axis = action - TABLE.axis_at
        if axis >= len(nest.axes) or nest.axes[axis].extent == 1:
            return False
    elif action < TABLE.operand_at:
        at, kind = divmod(action - TABLE.loop_at, TABLE.loop)
        if kind == loopnest.PARALLEL and threads == 1:
            return False
        repeats = at < len(walk.schedule.loops) and walk.schedule.trips(at)
        if 0 < kind < loopnest.MERGE and SPLITS[kind - 1] >= repeats:
            return False  # one of the two loops would make one trip
    elif action < TABLE.world_at:
        if (action - TABLE.operand_at) // TABLE.operand > len(nest.inputs):
            return False
    else:
        return True
    try:
        found = walk.applied(action)
    except ScheduleError:
        return False
    return len(found.loops) <= LOOPS and found.identity not in seen


@pytest.mark.parametrize("seed", range(16))
def test_the_mask_is_what_trying_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(drawn(rng), AVX2, threads=int(rng.choice([1, 4])))
    walk = walk_from(problem, str(rng.choice(["default", "untuned"])))
    seen: set[str] = set()
    for _ in range(10):
        seen.add(walk.schedule.identity)
        tried = [by_trying(walk, action, seen) for action in range(TABLE.size)]
        assert walk.mask.tolist() == tried, walk.schedule
        choices = np.flatnonzero(walk.mask[:-1])
        kinds = rng.permutation(choices)
        if not len(kinds):
            return
        walk = walk.take(int(kinds[0]))


@pytest.mark.parametrize("seed", range(6))
def test_long_walks_stay_within_the_slots_and_never_return(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    problem = Problem(drawn(rng), AVX2, threads=2)
    walk = walk_from(problem)
    identities = {walk.schedule.identity}
    while not walk.done:
        choices = np.flatnonzero(walk.mask)
        inner = choices[choices >= TABLE.loop_at]
        walk = walk.take(int(rng.choice(inner[:-1] if len(inner) > 1 else inner)))
        assert len(walk.schedule.loops) <= LOOPS
        if not walk.done:
            assert walk.schedule.identity not in identities
        identities.add(walk.schedule.identity)
        found = walk.observe()
        assert {k: (v.shape, v.dtype.name) for k, v in found.items()} == shapes(TABLE)
        assert replay(problem.nest, walk.schedule.actions) == walk.schedule
    assert walk.steps <= loopnest.HORIZON


@pytest.mark.parametrize("seed", range(4))
def test_keys_are_equal_where_identities_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(drawn(rng), AVX2, threads=2)
    found: dict[loopnest.Key, str] = {}
    for _ in range(3):
        walk = walk_from(problem)
        while not walk.done:
            assert found.setdefault(walk.key, walk.schedule.identity) == walk.schedule.identity
            walk = walk.take(int(rng.choice(np.flatnonzero(walk.mask))))
    assert len(set(found.values())) == len(found)


def test_what_the_mask_forbids_raises_where_states_are_used_directly() -> None:
    walk = walk_from(MATMUL)
    with pytest.raises(ScheduleError, match="would do"):
        walk.take(TABLE.size)


def test_starts_are_the_default_and_the_untuned_nest() -> None:
    env = made("looptune/LoopNest-v0")
    env.reset(options=options())
    assert env.state.schedule == default_schedule(MATMUL.nest, AVX2)
    env.reset(options=options(start="untuned"))
    assert env.state.schedule == Schedule(MATMUL.nest)


def test_the_horizon_leaves_only_stop() -> None:
    steps = 0
    walk = walk_from(CONV)
    while walk.mask[:-1].any():
        walk = walk.take(int(np.flatnonzero(walk.mask)[-2]))
        steps += 1
    assert steps == loopnest.HORIZON - 1
    assert walk.take(loopnest.STOP).done


def test_actions_have_names() -> None:
    walk = walk_from(SHARED, "untuned")
    names = [walk.name_of(int(action)) for action in np.flatnonzero(walk.mask)]
    assert len(set(names)) == len(names)
    assert {"stop", "split m by 4", "vectorize n", "share m", "pack b at root"} <= set(names)


# LoopTune-v0


def paper(*actions: str, nest: Any = MATMUL.nest) -> looptune_v0.CursorWalk:
    env = made("looptune/LoopTune-v0")
    env.reset(options=options(Problem(nest, AVX2)))
    for action in actions:
        *_, info = env.step(looptune_v0.ACTIONS.index(action))
        assert not info["illegal"], action
    return env.state


def test_the_example_of_the_paper_reaches_its_nest() -> None:
    nest = matmul(112, 128, 192).nests[0]
    walk = paper(
        "split_4", "swap_down", "swap_down", "down", "split_16", "swap_up", "swap_up", nest=nest
    )
    assert walk.schedule.order == "m:4 n:16 k m n"


def test_a_split_keeps_the_cursor_outside() -> None:
    walk = paper("split_16")
    assert (walk.cursor, walk.schedule.order) == (0, "m:16 m k n")
    assert [walk.size(at) for at in range(4)] == [6, 16, 64, 80]


def test_two_loops_of_one_axis_swap_silently() -> None:
    walk = paper("split_16", "swap_down")
    assert (walk.cursor, walk.schedule.order) == (1, "m:16 m k n")


def test_a_loop_of_one_trip_may_be_made() -> None:
    walk = paper("split_16", "down", "split_16")
    assert [walk.size(at) for at in range(5)] == [6, 1, 16, 64, 80]
    assert walk.schedule.order == "m:16 m k n"


def test_at_a_width_that_is_no_multiple_of_8_nothing_is_legal() -> None:
    env = made("looptune/LoopTune-v0")
    first, info = env.reset(options=options(Problem(matmul(64, 100, 64).nests[0], AVX2)))
    assert not info["action_mask"].any()
    for turn in range(1, 11):
        same, reward, terminated, truncated, info = env.step(6)
        assert equal(same, first)
        assert (reward, terminated, info["illegal"]) == (0.0, False, True)
        assert truncated == (turn == 10)


def test_at_most_ten_loops_those_of_the_output_among_them() -> None:
    splits = ("split_4", "split_4", "down", "down", "down", "split_4", "split_4")
    assert paper(*splits).mask[4:].any()
    walk = paper(*splits, "split_4")
    assert len(walk.loops) == 8
    assert not walk.mask[4:].any()


def test_rows_tell_cursor_sizes_tails_and_strides() -> None:
    rows = paper("down", nest=matmul(96, 80, 64).nests[0]).observe().reshape(10, 20)
    assert rows[:, 0].tolist() == [0, 1] + [0] * 8
    assert rows[:5, 1].tolist() == [96, 64, 80, 96, 80]
    assert rows[:5, 3].tolist() == [1, 1, 1, 0, 0]
    # m moves the output by 80 and the first input by 64; k moves the inputs by 1 and 80.
    assert np.flatnonzero(rows[0, 4:]).tolist() == [6, 7]
    assert np.flatnonzero(rows[1, 4:]).tolist() == [0, 7]
    assert rows[1, 4:].sum() == 1
    assert not rows[5:].any()


def test_rewards_are_changes_of_the_share_of_the_peak() -> None:
    env = made("looptune/LoopTune-v0")
    steps = episode(env, 6, **options())
    rates = [info["rate"] for *_, info in steps]
    assert [reward for _, reward, *_ in steps[1:]] == np.diff(rates).tolist()
    assert len(steps) == 1 + looptune_v0.HORIZON
    assert steps[-1][3]
    assert 0 < min(rates) <= max(rates) < 1


def test_what_cannot_be_lowered_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LoweringError("no")

    monkeypatch.setattr(looptune_v0, "predict", refuse)
    assert looptune_v0.modelled_rate(MATMUL, Schedule(MATMUL.nest)) == 0.0


def test_problems_by_default_are_the_matmuls_of_the_paper() -> None:
    problem = looptune_v0.paper_problems(np.random.default_rng(0))
    assert all(axis.extent in range(64, 257, 16) for axis in problem.nest.axes)


@needs_host
def test_rates_can_be_measured() -> None:
    rate = looptune_v0.MeasuredRate()
    found = rate(MATMUL, Schedule(MATMUL.nest))
    assert 0 < found < 1.5
    assert rate(MATMUL, Schedule(MATMUL.nest)) == found


@needs_host
def test_rates_are_of_the_peak_of_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def peak(target: Target, dtype: str) -> float:
        asked.append((target.name, dtype))
        return math.inf

    monkeypatch.setattr(looptune_v0, "highest_peak", peak)
    problem = Problem(matmul(8, 8, 8, dtype="float64").nests[0], AVX2)
    assert looptune_v0.MeasuredRate()(problem, Schedule(problem.nest)) == 0.0
    assert asked == [("avx2", "float64")]


def test_a_kernel_that_fails_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LoweringError("no")

    monkeypatch.setattr(looptune_v0, "build", refuse)
    assert looptune_v0.MeasuredRate()(MATMUL, Schedule(MATMUL.nest)) == 0.0
