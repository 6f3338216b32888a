"""The compact iBOT pre-trainer."""
