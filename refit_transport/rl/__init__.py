"""GRPO and PPO loops, losses, advantages, rollouts and tasks."""
