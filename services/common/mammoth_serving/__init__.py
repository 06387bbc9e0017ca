"""The serving base of both stages: settings, lifecycle, device worker, telemetry, Control. No torch, no kopf."""
