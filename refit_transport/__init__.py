"""Refit: move policy weights from trainer ranks to inference ranks, shard to shard."""
