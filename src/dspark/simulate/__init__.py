"""Serving under load without a model: requests arrive, and steps are drafted, scheduled, verified and committed."""
