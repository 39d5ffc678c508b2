"""The picture of the method shows what a run did: whose weights the reference has, and what is clipped."""

import pytest

from paper import method


def test_the_reference_is_the_policy_of_the_last_sync(monkeypatch):
    k = 4
    monkeypatch.setattr(method, "STEPS", 10)
    points, ratios = method.follow(k)
    assert len(points) == 10 and len(ratios) > 500
    policy = [point[0] for point in points]
    assert len(set(policy)) == 10
    for step, (_, reference) in enumerate(points):
        synced = k * ((step - 1) // k) if step else 0  # before the update of the step before, or earlier
        assert reference == pytest.approx(policy[synced], rel=1e-6), step
