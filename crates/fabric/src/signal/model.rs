//! Loom models: to be written.
