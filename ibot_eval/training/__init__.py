"""What pre-training and fine-tuning share: schedules, parameter groups, updates, checkpoints, logs and progress."""
