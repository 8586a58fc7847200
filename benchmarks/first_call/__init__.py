"""Time first calls: fresh processes, empty caches, side by side with another checkout and peers."""
