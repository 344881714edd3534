//! vLLM's `MooncakeConnector`.
