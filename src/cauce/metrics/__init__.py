"""What a run reports of itself: metric names, metrics file, TensorBoard, the live view and the summary."""
