"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right. What a test's own settings
# leave out they take from here.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
