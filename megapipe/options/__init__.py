"""Options of a step that take one file each, as extensions of its runner (`config.EXTENSIONS` names them)."""
