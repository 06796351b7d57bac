"""Binds a program to a rank's live tensors and staging memory."""
