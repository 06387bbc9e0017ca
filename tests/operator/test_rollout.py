"""The paired rollout: single steps as a table, and whole rollouts in a toy cluster that checks the promises at every step."""

from __future__ import annotations

import random

import pytest

from mammoth_operator.rollout import ALL, Past, Policy, Seen, plan_rollout, target_of

SURGE = Policy(1, 0)
FULL = Policy(0, 1)


def step(want, seen, *, proven=(), admitted="old", policy=SURGE, target="new"):
    pools = {(pool, revision): Seen(*numbers) for (pool, revision), numbers in seen.items()}
    return plan_rollout(
        target, {"ar": want[0], "dit": want[1]}, pools, proven=frozenset(proven), admitted=admitted, policy=policy
    )


OLD = {("ar", "old"): (1, 1, 1), ("dit", "old"): (1, 1, 1)}


@pytest.mark.parametrize(
    ("seen", "options", "replicas", "admit"),
    [
        pytest.param({}, {"admitted": None}, {("ar", "new"): 1, ("dit", "new"): 1}, "new", id="nothing-there-brings-both-up"),
        pytest.param(OLD, {}, {("dit", "new"): 1, ("ar", "new"): 0, ("ar", "old"): 1, ("dit", "old"): 1}, "old", id="dit-comes-first"),
        pytest.param({**OLD, ("dit", "new"): (1, 1, 1)}, {}, {("ar", "new"): 1, ("ar", "old"): 1, ("dit", "old"): 1}, "old", id="then-ar"),
        pytest.param({**OLD, ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)}, {}, {("ar", "old"): 1, ("dit", "old"): 1}, "old",
                     id="an-unproven-pair-takes-no-clients"),
        pytest.param({**OLD, ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)}, {"proven": ["new"]},
                     {("ar", "old"): 1, ("dit", "old"): 1}, "new", id="a-proven-pair-takes-the-clients-before-anything-leaves"),
        pytest.param({**OLD, ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)}, {"proven": ["new"], "admitted": "new"},
                     {("ar", "old"): 0, ("dit", "old"): 1}, "new", id="ar-leaves-first"),
        pytest.param({("ar", "old"): (0, 1, 0), ("dit", "old"): (1, 1, 1), ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)},
                     {"proven": ["new"], "admitted": "new"}, {("dit", "old"): 1}, "new", id="dit-waits-for-the-last-ar-pod"),
        pytest.param({("dit", "old"): (1, 1, 1), ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)},
                     {"proven": ["new"], "admitted": "new"}, {("dit", "old"): 0}, "new", id="then-dit-leaves"),
        pytest.param(OLD, {"policy": FULL}, {("ar", "old"): 0, ("dit", "old"): 1, ("dit", "new"): 0}, "old", id="full-cluster-drains-ar-first"),
        pytest.param({("dit", "old"): (1, 1, 1)}, {"policy": FULL}, {("dit", "old"): 0, ("dit", "new"): 0}, "old", id="full-cluster-then-dit"),
        pytest.param({("dit", "old"): (0, 0, 0)}, {"policy": FULL}, {("dit", "new"): 1, ("ar", "new"): 1}, "new", id="full-cluster-then-starts"),
        pytest.param(OLD, {"policy": Policy(recreate=True)}, {("ar", "old"): 0, ("dit", "old"): 1, ("dit", "new"): 0}, "old",
                     id="recreate-empties-ar-first"),
        pytest.param({("ar", "old"): (1, 1, 0), ("dit", "old"): (1, 1, 0), ("dit", "new"): (1, 1, 1), ("ar", "new"): (1, 1, 1)},
                     {"proven": ["new"], "admitted": ALL}, {("ar", "old"): 0}, "new", id="old-pods-that-never-came-up-leave"),
    ],
)  # fmt: skip
def test_the_next_step(seen, options, replicas, admit):
    plan = step((1, 1), seen, **options)
    assert {key: plan.replicas.get(key) for key in replicas} == replicas
    assert plan.admit == admit


def test_a_revert_treats_the_old_revision_as_the_target_again():
    seen = {("ar", "old"): (1, 1, 1), ("dit", "old"): (1, 1, 1), ("dit", "new"): (2, 2, 2), ("ar", "new"): (2, 2, 2)}
    plan = step((3, 3), seen, target="old", proven=["old", "new"], admitted=ALL)
    assert plan.replicas["ar", "new"] == 2
    assert plan.replicas["ar", "old"] == 2


def test_a_third_revision_waits_until_the_door_is_no_longer_open_to_all():
    seen = {("ar", "old"): (1, 1, 1), ("dit", "old"): (1, 1, 1), ("dit", "new"): (2, 2, 2), ("ar", "new"): (2, 2, 2)}
    plan = step((3, 3), seen, target="third", proven=["old", "new"], admitted=ALL)
    assert plan.replicas.get(("ar", "third"), 0) == 0
    assert plan.step == "returning to new before third starts"


class Toy:
    """Deployments, pods that become available after a while, an operator that plans after every event."""

    def __init__(self, want, policy, seed):
        self.want = {"ar": want[0], "dit": want[1]}
        self.policy, self.random = policy, random.Random(seed)
        self.replicas: dict[tuple[str, str], int] = {}
        self.pods: dict[tuple[str, str], list[str]] = {}
        self.admitted, self.proven, self.target = None, set(), "r0"

    def seen(self):
        return {
            key: Seen(self.replicas[key], len(self.pods[key]), self.pods[key].count("ready")) for key in self.replicas
        }

    def plan(self):
        plan = plan_rollout(
            self.target,
            self.want,
            self.seen(),
            proven=frozenset(self.proven),
            admitted=self.admitted,
            policy=self.policy,
        )
        for key, count in plan.replicas.items():
            self.replicas[key] = count
            self.pods.setdefault(key, [])
        self.admitted = plan.admit
        return plan

    def nature(self):
        for key, pods in self.pods.items():
            living = [pod for pod in pods if pod != "leaving"]
            if len(living) < self.replicas[key]:
                pods.append("starting")
            elif len(living) > self.replicas[key]:
                pods[pods.index("starting" if "starting" in pods else "ready")] = "leaving"
        moves = [(key, index) for key, pods in self.pods.items() for index, pod in enumerate(pods) if pod != "ready"]
        if moves:
            key, index = self.random.choice(moves)
            if self.pods[key][index] == "starting":
                self.pods[key][index] = "ready"
            else:
                del self.pods[key][index]
        for revision in {revision for _, revision in self.pods}:
            if all("ready" in self.pods.get((pool, revision), []) for pool in ("ar", "dit")):
                self.proven.add(revision)

    def reachable(self):
        """AR pods that clients reach and that have a DiT pod to stream to."""
        return sum(
            pods.count("ready")
            for (pool, revision), pods in self.pods.items()
            if pool == "ar" and self.admitted in (ALL, revision) and "ready" in self.pods.get(("dit", revision), [])
        )

    def settle(self, target, *, checked=True, limit=400):
        self.target = target
        for _ in range(limit):
            done = self.plan().done
            if done and all("leaving" not in pods and "starting" not in pods for pods in self.pods.values()):
                return
            self.nature()
            if checked:
                self.check()
        raise AssertionError(f"no end: {self.seen()} admitted {self.admitted!r}")

    def promised(self, pool):
        if not self.policy.max_surge and min(self.want.values()) <= self.policy.max_unavailable:
            return 0
        return self.want[pool] - self.policy.max_unavailable

    def check(self):
        for pool, want in self.want.items():
            total = sum(count for (name, _), count in self.replicas.items() if name == pool)
            assert total <= want + self.policy.max_surge, (pool, self.replicas)
            ready = sum(pods.count("ready") for (name, _), pods in self.pods.items() if name == pool)
            assert ready >= self.promised(pool), (pool, self.pods)
        assert self.reachable() >= self.promised("ar"), (self.pods, self.admitted)
        ready_ar = {revision for (pool, revision), pods in self.pods.items() if pool == "ar" and "ready" in pods}
        let_in = {revision for revision in ready_ar if self.admitted in (ALL, revision)}
        assert let_in <= self.proven or len(ready_ar) == 1, "clients reach a pair that was never proven"


@pytest.mark.parametrize("policy", [SURGE, Policy(2, 1), FULL, Policy(0, 2)], ids=str)
@pytest.mark.parametrize("want", [(1, 1), (1, 3), (3, 1), (3, 3), (2, 5)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_rollout_ends_and_keeps_its_promises_at_every_step(want, policy, seed):
    toy = Toy(want, policy, seed)
    toy.settle("r0", checked=False)
    toy.settle("r1")
    toy.settle("r0")


@pytest.mark.parametrize("seed", range(20))
def test_edits_and_reverts_in_mid_rollout_keep_the_promises(seed):
    toy = Toy((3, 3), SURGE, seed)
    toy.settle("r0", checked=False)
    for target in ("r1", "r2", "r0", "r3"):
        toy.target = target
        for _ in range(toy.random.randrange(1, 12)):
            toy.plan()
            toy.nature()
            toy.check()
    toy.settle("r3")
    assert {key for key, count in toy.replicas.items() if count} == {("ar", "r3"), ("dit", "r3")}


HISTORY = {"a": Past("a", 1, "ready"), "b": Past("b", 2, "ready"), "c": Past("c", 3, "failed"), "d": Past("d", 4)}


@pytest.mark.parametrize(
    ("asked", "options", "target"),
    [
        pytest.param("d", {}, "d", id="asked"),
        pytest.param("new", {}, "new", id="never-seen"),
        pytest.param("c", {}, "b", id="failed-goes-back-to-the-newest-ready"),
        pytest.param("c", {"auto_rollback": False}, "c", id="failed-without-auto-rollback"),
        pytest.param("d", {"pinned": "a"}, "a", id="pinned"),
        pytest.param("d", {"pinned": "zzz"}, "d", id="pinned-to-the-unknown"),
    ],
)
def test_the_revision_to_run(asked, options, target):
    assert target_of(asked, HISTORY, **{"pinned": "", "auto_rollback": True, **options}) == target
