"""Imported by the fork server alone, before it forks the first life."""

from tests.crash.lives import warm_up

warm_up()
