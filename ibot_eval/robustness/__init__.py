"""Damaged images: what is done to them, who classifies them, and what is measured."""
