"""The trained models: sharded workers that compute log-probabilities or values and take optimizer steps."""
