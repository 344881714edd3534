//! vLLM's `NixlConnector`.
