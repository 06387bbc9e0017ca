"""Decide caps and replicas from measurements: profile, twin, tuner, planner. Pure but for what the submodules' first lines say."""
