"""Which mesh axis each logical axis of an array lies on, for training, inference and planning alike."""
