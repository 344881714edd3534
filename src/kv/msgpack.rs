//! vLLM's event payloads: msgpack <-> [`super::event::Batch`].

pub mod encode;
